// SPDX-License-Identifier: Apache-2.0
// A rank's workers draw tasks from ticket counters. Rule that makes every wait end: within a queue a
// task waits only for tasks of its own rank with an earlier ticket, or for tasks of another rank that
// are of an earlier role; roles are ordered as in Role, and sends wait for nobody.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/group.hpp"

namespace uniep::cpu {

struct Task {
  Role role = Role::send;
  std::int32_t first = 0;   // chunk, tile or local expert
  std::int32_t second = 0;  // destination or source rank, or column tile
};

// One stage of a split schedule, or the whole operation of a fused one. A worker with a
// communication role starts with `comm`, any other with `compute`; each then helps with the other.
struct Phase {
  std::vector<Task> comm;
  std::vector<Task> compute;
};

// Runs the phases with the schedule's workers, this thread being worker 0, and returns when all are
// done. Errors: the first error of a worker, after the group was poisoned and all workers ended.
void run_phases(Group& group, int rank, const std::vector<Phase>& phases,
                const std::function<void(const Task&, int worker)>& run_task,
                std::vector<TraceEvent>& trace);

}  // namespace uniep::cpu
