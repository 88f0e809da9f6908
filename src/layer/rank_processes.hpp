// SPDX-License-Identifier: Apache-2.0
// Ranks as processes forked from this one. Whatever they share must be mapped before, and shared;
// what a rank has to say comes back through a pipe, whose end also tells that the rank is gone.
#pragma once

#include <functional>
#include <vector>

#include "memory/wait.hpp"
#include "uniep/trace.hpp"

namespace uniep {

// Runs body(rank) in a process for each rank and returns all their trace events. The caller should
// have no other threads. A rank that dies poisons the group at once, by name; children die with
// their parent; none is left when this returns. Errors: of the rank that failed first.
std::vector<TraceEvent> run_rank_processes(
    GroupState& state, const std::function<std::vector<TraceEvent>(int rank)>& body);

}  // namespace uniep
