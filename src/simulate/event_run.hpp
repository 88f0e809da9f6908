// SPDX-License-Identifier: Apache-2.0
// A layer of the GPU, event by event: the real plan of a routing, tasks in the order in which
// blocks draw them, a virtual clock. Unlike the closed form it knows every tile and every row, and
// it leaves the records that a measured run would.
#pragma once

#include <cstdint>
#include <span>

#include "simulate/hardware.hpp"
#include "simulate/load.hpp"
#include "uniep/trace.hpp"

namespace uniep::simulate {

inline constexpr int kMaxEventRanks = 64;

struct EventRun {
  double forward_us = 0;
  double backward_us = 0;  // 0 without one
  // Lanes: SM (worker) and, of its block, products (unit 0) and each moving warp (units from 1).
  // Backward begins where forward ends.
  Trace trace;
};

// Errors: invalid_argument for a schedule that is not legal, sizes or choices that do not fit, more
// than kMaxEventRanks ranks or more tiles than a run can hold.
[[nodiscard]] EventRun run_events(const Hardware& hardware, const LayerSizes& sizes,
                                  const Topology& topology, const CudaSchedule& schedule,
                                  std::span<const std::int64_t> tokens_per_rank,
                                  std::span<const std::int32_t> topk_ids, bool backward);

}  // namespace uniep::simulate
