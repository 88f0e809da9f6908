// SPDX-License-Identifier: Apache-2.0
// Ranks as processes forked from this one. Whatever they share must be mapped before, and shared;
// what a rank has to say comes back through a pipe, whose end also tells that the rank is gone.
#pragma once

#include <functional>
#include <vector>

#include "memory/wait.hpp"
#include "uniep/trace.hpp"

namespace uniep {

// A rank's work; what it recorded is in `trace` also if it throws.
using RankBody = std::function<void(int rank, Trace& trace)>;

// Runs body in a process for each rank. What the ranks that did not die recorded is appended to
// `trace` in any case. The caller should have no other threads. A rank that dies poisons the group
// at once, by name; children die with their parent; none is left when this returns. Errors: of the
// rank that failed first.
void run_rank_processes(GroupState& state, const RankBody& body, Trace& trace);

}  // namespace uniep
