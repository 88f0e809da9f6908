// SPDX-License-Identifier: Apache-2.0
// A rank's workers draw tasks from ticket counters. A task whose rows are not there yet is set
// aside, up to kWindow of them, and looked at again before a new ticket is drawn: a late rank holds
// up what needs it, and no more. Tasks never wait inside.
//
// Rule that makes every wait end: a task needs only tasks of its own rank with an earlier ticket,
// or tasks of another rank that are of an earlier role; roles are ordered as in Role, and sends
// need nobody. So the earliest unfinished task of the group is always running or ready in a window.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "cpu/group.hpp"
#include "cpu/recorder.hpp"

namespace uniep::cpu {

struct Task {
  Role role = Role::send;
  std::int32_t first = 0;   // chunk, tile or local expert
  std::int32_t second = 0;  // destination or source rank, or column tile
};

// One stage of a split schedule, or the whole operation of a fused one. A worker with a
// communication role starts with `comm`, any other with `compute`; each then helps with the other.
// Tasks of `compute` may need sends and pulls of `comm`, but no reduce.
struct Phase {
  std::vector<Task> comm;
  std::vector<Task> compute;
};

// What a task did, for its record.
struct TaskWork {
  std::int64_t flops = 0;       // of products
  std::int64_t link_bytes = 0;  // of rows put into or fetched from other ranks' memory
};

struct TaskFunctions {
  // What the task still waits for. Called by one worker at a time for any one task, and by the
  // worker that goes on to run it: what it saw with acquire is visible to the task.
  std::function<std::optional<Awaited>(const Task&)> missing;
  std::function<TaskWork(const Task&, int worker)> run;
  // For the record of a task: its part, expert and peer. Called only where tasks are recorded.
  std::function<void(const Task&, TraceEvent&)> describe;
};

inline constexpr std::size_t kWindow = 64;  // tasks set aside, per list

// Runs the phases with the schedule's workers, this thread being worker 0, and returns when all are
// done. Errors: the first error of a worker, after the group was poisoned and all workers ended;
// world if nothing became ready within the group's bound, naming what the oldest task waits for.
void run_phases(Group& group, int rank, const std::vector<Phase>& phases,
                const TaskFunctions& functions, Recorder& recorder);

}  // namespace uniep::cpu
