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
  Runner(Group& group, int rank, const std::vector<Phase>& phases, const TaskFunctions& functions,
         Recorder& recorder)
      : group_(group),
        rank_(rank),
        phases_(phases),
        functions_(functions),
        recorder_(recorder),
        progress_(phases.size()) {}

  void work(int worker) {
    try {
      for (std::size_t i = 0; i < phases_.size(); ++i) {
        const Phase& phase = phases_[i];
        const bool comm_first = worker < group_.config().schedule.comm_workers;
        const auto drain_comm = [&] { drain(phase.comm, progress_[i].comm, i, worker); };
        if (comm_first) drain_comm();
        drain(phase.compute, progress_[i].compute, i, worker);
        if (!comm_first) drain_comm();
        WaitSite site;
        site.rank = rank_;
        site.stage = "phase";
        site.role = "worker";
        site.signal = Signal::phase_done;
        recorder_.wait(group_.state(),
                       {.word = &progress_[i].done,
                        .expected = phase.comm.size() + phase.compute.size(),
                        .site = site},
                       worker);
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
  // A worker's time without a task that it could run, where it is recorded.
  struct Idle {
    explicit Idle(int of_worker) : worker(of_worker) {}
    int worker;
    std::optional<std::int64_t> since;  // now_ns(); none while a task runs
    Awaited awaited;                    // without a word: unknown
  };

  void begin(Idle& idle, Queue& queue) {
    idle.since = now_ns();
    const std::lock_guard lock(queue.mutex);
    idle.awaited = queue.waits.empty() ? Awaited{} : queue.waits.begin()->second;
  }

  void end(Idle& idle, bool failed) {
    if (idle.since) recorder_.keep_wait(idle.worker, *idle.since, idle.awaited, failed);
    idle.since.reset();
  }

  // Runs the list's tasks until none is left to take.
  void drain(const std::vector<Task>& tasks, Queue& queue, std::size_t phase, int worker) {
    Idle idle(worker);
    try {
      drain(tasks, queue, phase, idle);
    } catch (...) {
      // What the rank stood at, unless it was this worker's own task that failed.
      if (idle.since) idle.awaited = first_cause(phase).value_or(idle.awaited);
      end(idle, true);
      throw;
    }
  }

  void drain(const std::vector<Task>& tasks, Queue& queue, std::size_t phase, Idle& idle) {
    bool is_idle = false;
    std::chrono::steady_clock::time_point idle_since{};
    std::uint64_t progress = 0;  // of the group, when this worker became idle or looked last
    int round = 0;
    while (true) {
      throw_if_aborted(group_.state(), rank_);
      bool finished = false;
      if (const Task* task = take(tasks, queue, finished, idle.awaited)) {
        end(idle, false);
        run(*task, phase, idle.worker);
        is_idle = false;
        round = 0;
        continue;
      }
      if (finished) return end(idle, false);
      if (recorder_.on() && !idle.since) begin(idle, queue);
      const auto now = std::chrono::steady_clock::now();
      const std::uint64_t progress_now = group_.state().progress.load(std::memory_order_relaxed);
      if (!is_idle || progress_now != progress) idle_since = now;
      is_idle = true;
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

  // A task that can run now, and in `awaited` what it waited for last, if it did; or none, and then
  // whether all tasks of the list run or have run.
  const Task* take(const std::vector<Task>& tasks, Queue& queue, bool& finished, Awaited& awaited) {
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
        if (const auto waited = queue.waits.find(ticket); waited != queue.waits.end()) {
          awaited = waited->second;
          queue.waits.erase(waited);
        }
        return &tasks[ticket];
      }
      queue.waits.insert_or_assign(ticket, *missing);
      const auto place = std::lower_bound(queue.aside.begin(), queue.aside.end(), ticket);
      look_at = static_cast<std::size_t>(place - queue.aside.begin()) + 1;
      queue.aside.insert(place, ticket);
    }
  }

  void run(const Task& task, std::size_t phase, int worker) {
    {
      RecordedSpan span(recorder_, TraceKind::task, worker);
      if (recorder_.on()) {
        span.event.role = task.role;
        span.event.index = task.first;
        functions_.describe(task, span.event);
      }
      if (const auto& before_task = group_.config().before_task) {
        before_task({.rank = rank_, .worker = worker, .role = task.role, .index = task.first});
        if (recorder_.on()) span.event.start_ns = now_ns();
      }
      const TaskWork work = functions_.run(task, worker);
      span.event.flops = work.flops;
      span.event.link_bytes = work.link_bytes;
    }
    std::atomic_ref<std::uint64_t>(progress_[phase].done).fetch_add(1, std::memory_order_acq_rel);
    group_.state().progress.fetch_add(1, std::memory_order_relaxed);
  }

  Group& group_;
  int rank_;
  const std::vector<Phase>& phases_;
  const TaskFunctions& functions_;
  Recorder& recorder_;
  std::vector<Progress> progress_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_phases(Group& group, int rank, const std::vector<Phase>& phases,
                const TaskFunctions& functions, Recorder& recorder) {
  const int num_workers = group.config().schedule.workers;
  Runner runner(group, rank, phases, functions, recorder);
  {
    std::vector<std::jthread> threads;
    for (int worker = 1; worker < num_workers; ++worker) {
      try {
        threads.emplace_back([&, worker] { runner.work(worker); });
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
    runner.work(0);
  }
  runner.rethrow();
}

}  // namespace uniep::cpu
