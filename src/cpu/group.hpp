// SPDX-License-Identifier: Apache-2.0
// What the ranks of one group share on the CPU: the symmetric heap with its layout, the state of
// bounded waits, and the schedule, the same for all by construction. Ranks are threads here.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "layout/heap_layout.hpp"
#include "memory/symmetric_heap.hpp"
#include "memory/wait.hpp"
#include "schedule/schedule.hpp"
#include "topo/placement.hpp"

namespace uniep::cpu {

enum class Role { send, pull, fanout, gemm1, activation, gemm2, dgrad2, d_activation, dgrad1, wgrad2,
                  wgrad1, reduce };
[[nodiscard]] const char* to_string(Role role);

struct TaskInfo {
  int rank = 0;
  int worker = 0;
  Role role = Role::send;
  std::int64_t index = 0;  // token chunk, row tile or local expert
};

struct TraceEvent {
  TaskInfo task;
  std::int64_t start_ns = 0;  // steady clock
  std::int64_t end_ns = 0;
};

struct GroupConfig {
  HeapShape shape;
  Schedule schedule;
  Placement placement;
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  std::function<void(const TaskInfo&)> before_task;  // tests: delays and faults; may throw Error
  bool trace = false;
};

class Group {
 public:
  // Errors: invalid_argument for a schedule or shape that cannot run; world if memory is refused.
  explicit Group(GroupConfig config);

  [[nodiscard]] const GroupConfig& config() const { return config_; }
  [[nodiscard]] const HeapLayout& layout() const { return layout_; }
  [[nodiscard]] GroupState& state() { return *state_; }

  template <typename T>
  [[nodiscard]] T* region(int rank, Region region) {
    return reinterpret_cast<T*>(heap_->map(rank) + layout_.offset(region));
  }

 private:
  GroupConfig config_;
  HeapLayout layout_;
  std::unique_ptr<SymmetricHeap> heap_;
  std::unique_ptr<GroupState> state_;
};

}  // namespace uniep::cpu
