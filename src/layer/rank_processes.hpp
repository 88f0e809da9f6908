// SPDX-License-Identifier: Apache-2.0
// Ranks as processes forked from this one. Whatever they share must be mapped before, and shared;
// what a rank has to say comes back through a pipe, whose end also tells that the rank is gone.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "memory/wait.hpp"
#include "uniep/trace.hpp"

namespace uniep {

// Anonymous shared memory, zero-filled, for results. Errors: world if it is not there.
class SharedBytes {
 public:
  explicit SharedBytes(std::size_t bytes);
  ~SharedBytes();
  SharedBytes(const SharedBytes&) = delete;
  SharedBytes& operator=(const SharedBytes&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Runs body(rank) in a process for each rank and returns all their trace events. The caller should
// have no other threads. A rank that dies poisons the group at once, by name; children die with
// their parent; none is left when this returns. Errors: of the rank that failed first.
std::vector<TraceEvent> run_rank_processes(
    GroupState& state, const std::function<std::vector<TraceEvent>(int rank)>& body);

}  // namespace uniep
