// SPDX-License-Identifier: Apache-2.0
// What the ranks of one group share on the CPU: the symmetric heap with its layout, the state of
// bounded waits, and the schedule, the same for all ranks. Ranks are
// threads, forked processes, or the processes of a job.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layout/heap_layout.hpp"
#include "memory/bootstrap.hpp"
#include "memory/symmetric_heap.hpp"
#include "memory/wait.hpp"
#include "topo/placement.hpp"
#include "uniep/job.hpp"
#include "uniep/schedule.hpp"
#include "uniep/trace.hpp"

namespace uniep::cpu {

struct GroupConfig {
  HeapShape shape;
  Schedule schedule;
  Placement placement;
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  std::function<void(const TaskInfo&)> before_task;  // tests: delays and faults; may throw Error
  std::int64_t trace_capacity = 0;  // records that each worker keeps of an operation; 0 = none
  std::optional<Job> job;           // this process is one rank of it; otherwise it holds all ranks
  std::string job_agreement;        // what the job's ranks must agree on beside the above
  std::size_t common_bytes = 0;     // of memory that all ranks share, zero-filled
};

// Where a rank stands in the order of operations.
struct RankEpochs {
  std::uint64_t current = 0;           // of the operation under way, or the last one
  std::uint64_t first = 1;             // of this generation; nobody waits for consumed below it
  std::atomic<bool> attached = false;  // to a layer
};

// Errors: invalid_argument for more threads than are served.
void check_num_threads(int num_ranks, const Schedule& schedule);
// Errors: invalid_argument unless 1 to kMaxTraceCapacity.
void check_trace_capacity(std::int64_t capacity);

class Group {
 public:
  // Errors: invalid_argument for a schedule or shape that cannot run; world if memory is refused.
  // Collective in a job, with the errors of its bootstrap.
  explicit Group(GroupConfig config);

  [[nodiscard]] const GroupConfig& config() const { return config_; }
  [[nodiscard]] const HeapLayout& layout() const { return layout_; }
  [[nodiscard]] GroupState& state() { return *state_; }

  [[nodiscard]] std::byte* common() { return heap_->common(); }

  // Errors: invalid_argument for a rank outside the group or, in a job, of another process.
  [[nodiscard]] RankEpochs& epochs(int rank);

  template <typename T>
  [[nodiscard]] T* region(int rank, Region region) {
    return reinterpret_cast<T*>(heap_->map(rank) + layout_.offset(region));
  }

 private:
  GroupConfig config_;
  HeapLayout layout_;
  std::unique_ptr<SymmetricHeap> heap_;
  GroupState* state_ = nullptr;  // in the heap
  std::vector<RankEpochs> epochs_;
  std::unique_ptr<Bootstrap> bootstrap_;  // of a job; its watcher uses the heap
};

}  // namespace uniep::cpu
