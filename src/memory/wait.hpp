// SPDX-License-Identifier: Apache-2.0
// The one way to wait: bounded, reporting who waited for what, and ended early when any rank of the
// group failed. A failed group stays failed until all its ranks call recover.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "uniep/trace.hpp"

namespace uniep {

struct WaitSite {
  int rank = 0;
  const char* stage = "";
  const char* role = "";
  int expert = -1;
  std::int64_t tile = -1;
  int peer = -1;
  Signal signal = Signal::none;  // what *word is; this and the next are for the timeline only
  Role task_role = Role::none;   // of the task that waits
};

// Shared by the ranks of one group, which may be processes: no pointers, no locks.
struct GroupState {
  GroupState(int ranks, std::chrono::nanoseconds wait_bound)
      : num_ranks(ranks), bound(wait_bound) {}

  const int num_ranks;
  const std::chrono::nanoseconds bound;
  // Counted up by every worker of the group at the end of a task, looked at by all waits: one that
  // sees it change starts its bound anew, since a busy peer is slow, not lost. Nothing else becomes
  // visible. Tasks are finite, so waits are still bounded.
  std::atomic<std::uint64_t> progress{0};
  // Written by the first rank that fails, after `report`; polled by every wait; the report becomes
  // visible. Zero while all is well; cleared only inside recover, when no rank can be waiting.
  std::atomic<std::uint64_t> abort_word{0};
  // Taken by the rank that will write the report: only the first failure is told.
  std::atomic<std::uint64_t> report_claim{0};
  // Counted up by each rank that calls recover, awaited by all; n * num_ranks means that every rank
  // has ended its work of generation n - 1.
  std::uint64_t arrived = 0;
  // Raised by the last to arrive, awaited by the others; the cleared abort word becomes visible.
  std::uint64_t generation = 0;
  static constexpr std::size_t kReportBytes = 1024;
  char report[kReportBytes] = {};  // ends with 0
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "ranks may be processes");

// Returns once *word >= expected, with acquire. Errors: world once nothing in the group made
// progress for state.bound, with the whole site, expected and seen value, after poisoning the
// group; world with the first failure's sentence if the group was poisoned.
void wait_at_least(GroupState& state, std::uint64_t* word, std::uint64_t expected,
                   const WaitSite& site);

// Poisons the group, unless it already is: the first report is kept, cut to kReportBytes.
void abort_group(GroupState& state, int rank, const std::string& text);

// The same for a rank that is gone, by whoever saw it go: it may have died in abort_group.
void abort_for_lost_rank(GroupState& state, int rank, const std::string& text);

// One wait as a value, for those who look again later instead of blocking.
struct Awaited {
  std::uint64_t* word = nullptr;
  std::uint64_t expected = 0;
  WaitSite site;
};

// Rests a little longer each round: a few looks, then the core is given away.
void pause_for(int round);

// Errors: world with the first failure's sentence if the group is poisoned.
void throw_if_aborted(GroupState& state, int rank);

// The end of a wait that was not met: reports and poisons as wait_at_least does.
[[noreturn]] void expire(GroupState& state, const Awaited& awaited,
                         std::chrono::nanoseconds waited);

// The first failure's sentence if the group is poisoned: nothing may start before recover.
[[nodiscard]] std::optional<std::string> failure_of(GroupState& state);

// Collective: returns the new generation when all ranks have called it, each after its own work has
// ended. Errors: world if a rank does not come within the bound; calling again is then valid.
[[nodiscard]] std::uint64_t recover(GroupState& state, int rank);

}  // namespace uniep
