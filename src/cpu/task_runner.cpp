// SPDX-License-Identifier: Apache-2.0
#include "cpu/task_runner.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "memory/signal.hpp"
#include "memory/wait.hpp"

namespace uniep::cpu {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The tickets of one list of tasks, and those set aside.
struct Queue {
  std::mutex mutex;
  std::size_t next = 0;
  std::vector<std::size_t> aside;  // ascending; a worker takes one out while it looks at it
  // What each task that was set aside waited for at the last look, by ticket, until it runs.
  std::map<std::size_t, Awaited> waits;
  std::size_t first_looks = 0;  // tasks drawn and not yet looked at
};

struct Progress {
  Queue comm;
  Queue compute;
  // Advanced by the worker that finished a task, awaited by all workers at the end of a phase;
  // everything the phase wrote becomes visible.
  std::uint64_t done = 0;
};

class Runner {
 public:
  Runner(Group& group, int rank, const std::vector<Phase>& phases, const TaskFunctions& functions)
      : group_(group),
        rank_(rank),
        phases_(phases),
        functions_(functions),
        progress_(phases.size()) {}

  void work(int worker, std::vector<TraceEvent>& trace) {
    try {
      for (std::size_t i = 0; i < phases_.size(); ++i) {
        const Phase& phase = phases_[i];
        const bool comm_first = worker < group_.config().schedule.comm_workers;
        const auto drain_comm = [&] { drain(phase.comm, progress_[i].comm, i, worker, trace); };
        if (comm_first) drain_comm();
        drain(phase.compute, progress_[i].compute, i, worker, trace);
        if (!comm_first) drain_comm();
        WaitSite site;
        site.rank = rank_;
        site.stage = "phase";
        site.role = "worker";
        wait_at_least(group_.state(), &progress_[i].done, phase.comm.size() + phase.compute.size(),
                      site);
      }
    } catch (const std::exception& error) {
      abort_group(group_.state(), rank_, error.what());
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void drain(const std::vector<Task>& tasks, Queue& queue, std::size_t phase, int worker,
             std::vector<TraceEvent>& trace) {
    bool idle = false;
    std::chrono::steady_clock::time_point idle_since{};
    std::uint64_t progress = 0;  // of the group, when this worker became idle or looked last
    int round = 0;
    while (true) {
      throw_if_aborted(group_.state(), rank_);
      bool finished = false;
      if (const Task* task = take(tasks, queue, finished)) {
        run(*task, phase, worker, trace);
        idle = false;
        round = 0;
        continue;
      }
      if (finished) return;
      const auto now = std::chrono::steady_clock::now();
      const std::uint64_t progress_now = group_.state().progress.load(std::memory_order_relaxed);
      if (!idle || progress_now != progress) idle_since = now;
      idle = true;
      progress = progress_now;
      if (now - idle_since > group_.state().bound) {
        if (const auto cause = first_cause(phase)) {
          expire(group_.state(), *cause, now - idle_since);
        }
      }
      pause_for(round++);
    }
  }

  // Of all that the tasks set aside in both lists wait for, what the one of the earliest role does:
  // a reduce that waits because a fan-out of this rank does is a consequence. None while a task was
  // not looked at, or all that was missing has come: then this rank goes on.
  std::optional<Awaited> first_cause(std::size_t phase) {
    std::optional<std::pair<Role, Awaited>> first;
    const auto look = [&](const std::vector<Task>& tasks, Queue& queue) {
      const std::lock_guard lock(queue.mutex);
      for (const auto& [ticket, awaited] : queue.waits) {
        const Role role = tasks[ticket].role;
        if (read_acquire(awaited.word) < awaited.expected && (!first || role < first->first)) {
          first.emplace(role, awaited);
        }
      }
      return queue.first_looks == 0;
    };
    Progress& progress = progress_[phase];
    const bool all_looked_at =
        look(phases_[phase].comm, progress.comm) && look(phases_[phase].compute, progress.compute);
    if (!all_looked_at || !first) return std::nullopt;
    return first->second;
  }

  // A task that can run now, or none: then whether all tasks of the list run or have run.
  const Task* take(const std::vector<Task>& tasks, Queue& queue, bool& finished) {
    std::size_t look_at = 0;  // place among those aside
    while (true) {
      std::size_t ticket = 0;
      bool is_new = false;
      {
        const std::lock_guard lock(queue.mutex);
        if (look_at < queue.aside.size()) {
          ticket = queue.aside[look_at];
          queue.aside.erase(queue.aside.begin() + static_cast<std::ptrdiff_t>(look_at));
        } else if (queue.next < tasks.size() && queue.aside.size() < kWindow) {
          ticket = queue.next++;
          is_new = true;
          ++queue.first_looks;
        } else {
          finished = queue.next == tasks.size() && queue.waits.empty() && queue.first_looks == 0;
          return nullptr;
        }
      }
      const std::optional<Awaited> missing = functions_.missing(tasks[ticket]);
      const std::lock_guard lock(queue.mutex);
      if (is_new) --queue.first_looks;
      if (!missing) {
        queue.waits.erase(ticket);
        return &tasks[ticket];
      }
      queue.waits.insert_or_assign(ticket, *missing);
      const auto place = std::lower_bound(queue.aside.begin(), queue.aside.end(), ticket);
      look_at = static_cast<std::size_t>(place - queue.aside.begin()) + 1;
      queue.aside.insert(place, ticket);
    }
  }

  void run(const Task& task, std::size_t phase, int worker, std::vector<TraceEvent>& trace) {
    const GroupConfig& config = group_.config();
    const TaskInfo info{.rank = rank_, .worker = worker, .role = task.role, .index = task.first};
    if (config.before_task) config.before_task(info);
    const std::int64_t start = config.trace ? now_ns() : 0;
    functions_.run(task, worker);
    if (config.trace) trace.push_back({.task = info, .start_ns = start, .end_ns = now_ns()});
    std::atomic_ref<std::uint64_t>(progress_[phase].done).fetch_add(1, std::memory_order_acq_rel);
    group_.state().progress.fetch_add(1, std::memory_order_relaxed);
  }

  Group& group_;
  int rank_;
  const std::vector<Phase>& phases_;
  const TaskFunctions& functions_;
  std::vector<Progress> progress_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_phases(Group& group, int rank, const std::vector<Phase>& phases,
                const TaskFunctions& functions, std::vector<TraceEvent>& trace) {
  const int num_workers = group.config().schedule.workers;
  Runner runner(group, rank, phases, functions);
  std::vector<std::vector<TraceEvent>> traces(static_cast<std::size_t>(num_workers));
  {
    std::vector<std::jthread> threads;
    for (int worker = 1; worker < num_workers; ++worker) {
      try {
        threads.emplace_back(
            [&, worker] { runner.work(worker, traces[static_cast<std::size_t>(worker)]); });
      } catch (const std::system_error& error) {
        // Poisoned at once, or the workers that did start would wait for their bound.
        const std::string text = fmt::format(
            "the system refused thread {} of the {} workers of rank {}: {}; use fewer ranks or "
            "workers",
            worker + 1, num_workers, rank, error.code().message());
        abort_group(group.state(), rank, text);
        throw_world("{}", text);
      }
    }
    runner.work(0, traces[0]);
  }
  for (const auto& events : traces) trace.insert(trace.end(), events.begin(), events.end());
  runner.rethrow();
}

}  // namespace uniep::cpu
