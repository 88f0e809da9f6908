// SPDX-License-Identifier: Apache-2.0
// How the processes of a job find each other, get common memory, and learn that one is gone.
//
// Rank 0 listens on a Unix socket whose abstract name comes from the job's; it exists only while
// ranks are still to come. The connections stay: a rank says when it leaves, so one that ends
// without a word was lost. Loss is noticed by rank 0, and rank 0's own loss by everyone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/descriptor.hpp"
#include "memory/shared_memory.hpp"
#include "memory/wait.hpp"
#include "uniep/error.hpp"
#include "uniep/job.hpp"

namespace uniep {

class Bootstrap {
 public:
  // Collective. `agreement` is a text that must be the same for all ranks. Rank 0 returns when all
  // have come, the others when they found it. Errors: world for ranks that do not come within the
  // bound or are lost; invalid_argument, on the others in share, where agreements differ.
  Bootstrap(const Job& job, const std::string& agreement, std::chrono::nanoseconds bound);
  // Says goodbye, unless an exception is on its way through here.
  ~Bootstrap();
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  // Collective: zero-filled memory of all ranks. Rank 0 runs `fill` on it before others see it;
  // what goes wrong there is the error of every rank.
  [[nodiscard]] SharedMemory share(std::size_t bytes, const std::function<void(std::byte*)>& fill);

  // Collective, before watch: every rank gives a descriptor and gets those of all, by rank; the own
  // one too. Errors: world for a rank that does not come within the bound, or is lost.
  [[nodiscard]] std::vector<Descriptor> exchange(const Descriptor& own);

  // From now on a rank that is lost poisons the group, by name. At most once, after share.
  void watch(GroupState& state);

 private:
  struct Peer {
    Descriptor socket;
    int rank = 0;
    std::int64_t process = 0;
  };
  struct Hello {
    int rank = 0;
    int num_ranks = 0;
    std::int64_t process = 0;
    std::string agreement;
  };
  void gather(const std::string& agreement);
  void join(const std::string& agreement);
  [[nodiscard]] std::optional<Hello> admit(const Descriptor& listener);
  void admit_late(const Descriptor& listener);
  void check(const Hello& hello, const std::string& agreement) const;
  void refuse(const Error& error);
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] std::vector<Descriptor> hand_round(const Descriptor& own);
  void watch_peers(GroupState& state);
  static void hear_end(const Peer& peer, GroupState& state);

  Job job_;
  std::chrono::nanoseconds bound_;
  std::chrono::steady_clock::time_point deadline_;
  int exceptions_ = 0;
  std::vector<Peer> peers_;  // rank 0: all others, as they came; others: rank 0
  Descriptor stop_;          // wakes the watcher
  std::thread watcher_;
};

}  // namespace uniep
