// SPDX-License-Identifier: Apache-2.0
// The schedule space of a shape: which points can run, why another cannot, and all of those that
// can. Pure functions of sizes; nothing here looks at a machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "schedule/cuda_schedule.hpp"
#include "uniep/dtype.hpp"
#include "uniep/schedule.hpp"

namespace uniep {

// Of the text of a schedule and of what its values mean. Whoever changes either raises it: stored
// schedules of other versions are not read.
inline constexpr int kScheduleVersion = 1;
inline constexpr int kCudaScheduleVersion = 1;

struct LayerSizes {
  std::int64_t tokens = 0;  // of the rank that has most
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t experts = 0;  // over all ranks
  int topk = 1;
  int ranks = 1;
  DType dtype = DType::bf16;
};

// What a GPU lends to the kernels of one launch.
struct GpuLimits {
  int sms = 132;
  std::int64_t shared_bytes = 232448;  // of a block
  int ranks_per_gpu = 1;               // virtual ranks that share it
};

// What is left for a schedule with blocks = 0.
[[nodiscard]] int default_blocks(const GpuLimits& limits);

// Why the schedule cannot run, a sentence that names the value and what would be valid; nothing
// where it can.
[[nodiscard]] std::optional<std::string> why_illegal(const Schedule& schedule,
                                                     const LayerSizes& sizes);
[[nodiscard]] std::optional<std::string> why_illegal(const CudaSchedule& schedule,
                                                     const LayerSizes& sizes,
                                                     const GpuLimits& limits);

// All legal points that differ in what they do, in a fixed order. What the caller decides is taken
// from `base`: the number of workers, or of SMs for products.
[[nodiscard]] std::vector<Schedule> legal_schedules(const LayerSizes& sizes, const Schedule& base);
[[nodiscard]] std::vector<CudaSchedule> legal_cuda_schedules(const LayerSizes& sizes,
                                                             const GpuLimits& limits,
                                                             const CudaSchedule& base);

}  // namespace uniep
