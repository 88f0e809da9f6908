// SPDX-License-Identifier: Apache-2.0
// Records arranged for drawing: of each worker, what it did one after the other.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "uniep/trace.hpp"

namespace uniep::timeline {

// What a worker's time is spent on: the roles in their order, then these.
inline constexpr int kPlan = static_cast<int>(Role::none);
inline constexpr int kWait = kPlan + 1;
inline constexpr int kFailed = kPlan + 2;  // a task or a wait that did not end well
inline constexpr int kUses = kPlan + 3;
[[nodiscard]] std::string name_of_use(int use);

struct Segment {
  std::int64_t start_ns = 0;
  std::int64_t end_ns = 0;
  int use = 0;
  const TraceEvent* event = nullptr;
};

struct Worker {
  int rank = 0;
  int worker = 0;
  int unit = 0;
  std::vector<Segment> segments;         // ascending, none in another
  std::array<std::int64_t, kUses> ns{};  // by use
};

struct Arranged {
  std::int64_t start_ns = 0;  // the first start and the last end; at least 1 ns apart
  std::int64_t end_ns = 1;
  std::vector<Worker> workers;                // by rank, worker, unit
  std::vector<const TraceEvent*> operations;  // as recorded
};

// Of the first `num_ranks` ranks the first `workers` are there in any case: one that never came to
// run has no segments. Keeps pointers into `trace`.
[[nodiscard]] Arranged arrange(const Trace& trace, int num_ranks = 0, int workers = 0);

// Amounts of work in `bins` equal parts of the whole time; a task's is spread evenly over it.
[[nodiscard]] std::vector<double> spread(const Arranged& all, std::int64_t TraceEvent::*amount,
                                         std::size_t bins);

// "gemm1, tile 3, part 1, expert 5", or what a wait was for.
[[nodiscard]] std::string describe(const TraceEvent& event);

}  // namespace uniep::timeline
