// SPDX-License-Identifier: Apache-2.0
#include "cpu/task_runner.hpp"

#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

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

struct Progress {
  std::uint64_t comm_ticket = 0;
  std::uint64_t compute_ticket = 0;
  // Advanced by the worker that finished a task, awaited by all workers at the end of a phase;
  // everything the phase wrote becomes visible.
  std::uint64_t done = 0;
};

class Runner {
 public:
  Runner(Group& group, int rank, const std::vector<Phase>& phases,
         const std::function<void(const Task&, int)>& run_task)
      : group_(group), rank_(rank), phases_(phases), run_task_(run_task), progress_(phases.size()) {}

  void work(int worker, std::vector<TraceEvent>& trace) {
    try {
      for (std::size_t i = 0; i < phases_.size(); ++i) {
        const Phase& phase = phases_[i];
        const bool comm_first = worker < group_.config().schedule.comm_workers;
        const auto drain_comm = [&] { drain(phase.comm, progress_[i].comm_ticket, i, worker, trace); };
        if (comm_first) drain_comm();
        drain(phase.compute, progress_[i].compute_ticket, i, worker, trace);
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
  void drain(const std::vector<Task>& tasks, std::uint64_t& ticket, std::size_t phase, int worker,
             std::vector<TraceEvent>& trace) {
    const GroupConfig& config = group_.config();
    while (true) {
      const std::uint64_t mine =
          std::atomic_ref<std::uint64_t>(ticket).fetch_add(1, std::memory_order_relaxed);
      if (mine >= tasks.size()) return;
      const Task& task = tasks[mine];
      const TaskInfo info{.rank = rank_, .worker = worker, .role = task.role, .index = task.first};
      if (config.before_task) config.before_task(info);
      const std::int64_t start = config.trace ? now_ns() : 0;
      run_task_(task, worker);
      if (config.trace) trace.push_back({.task = info, .start_ns = start, .end_ns = now_ns()});
      std::atomic_ref<std::uint64_t>(progress_[phase].done)
          .fetch_add(1, std::memory_order_acq_rel);
      group_.state().progress.fetch_add(1, std::memory_order_relaxed);
    }
  }

  Group& group_;
  int rank_;
  const std::vector<Phase>& phases_;
  const std::function<void(const Task&, int)>& run_task_;
  std::vector<Progress> progress_;
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_phases(Group& group, int rank, const std::vector<Phase>& phases,
                const std::function<void(const Task&, int)>& run_task,
                std::vector<TraceEvent>& trace) {
  const int num_workers = group.config().schedule.workers;
  Runner runner(group, rank, phases, run_task);
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
