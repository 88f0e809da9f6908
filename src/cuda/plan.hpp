// SPDX-License-Identifier: Apache-2.0
// The plan of one step on the device: what src/plan computes on the host, array by array and bit by
// bit, from topk_ids in device memory, with the exchange of counts inside and no host
// synchronisation. Can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cuda/plan_args.hpp"
#include "cuda/symmetric_memory.hpp"
#include "topo/placement.hpp"

namespace uniep::cuda {

struct PlanShape {
  int topk = 1;
  std::int64_t max_tokens = 0;  // per rank
  int tile_m = 128;             // rows of a tile, at most
  int blocks_per_rank = 16;     // the same on every rank
};

// Ranks first, … first + count - 1, which one process has.
struct RankRange {
  int first = 0;
  int count = 0;
};

struct RankTopk {
  const std::int32_t* topk_ids = nullptr;  // device memory, [num_tokens, topk]; -1 is masked
  std::int64_t num_tokens = 0;
};

class DevicePlan {
 public:
  // A rank's part of the symmetric memory must hold this much. Errors: as the constructor's.
  [[nodiscard]] static std::int64_t bytes_per_rank(const PlanShape& shape,
                                                   const Placement& placement);

  // `memory` must outlive the plan. `tile_orders`, if not empty, has for each rank the order in
  // which its local experts get tiles; otherwise they ascend. Only ranks of `local`, without it
  // all, have arrays and can be planned. Errors: invalid_argument names the value and what is
  // valid; world if memory or a GPU is not there.
  DevicePlan(const SymmetricMemory& memory, const PlanShape& shape, const Placement& placement,
             std::span<const std::vector<std::int32_t>> tile_orders = {},
             std::optional<RankRange> local = std::nullopt);
  DevicePlan(const DevicePlan&) = delete;
  DevicePlan& operator=(const DevicePlan&) = delete;
  ~DevicePlan();

  // Plans ranks first_rank, first_rank + 1, … of the group in one launch; asynchronous in `stream`.
  // All ranks of the group must be launched, in the same order of operations: one launch with all
  // of them needs nothing else, several must be resident together. Errors: invalid_argument before
  // anything is launched; world if CUDA refuses, for example because of residency.
  void run(std::span<const RankTopk> ranks, cudaStream_t stream, int first_rank = 0);

  // Waits for `stream`. Errors: invalid_argument names the first refused id since the last check,
  // by rank, token and choice, and the next plan works; world if a wait expired, see
  // SymmetricMemory::check.
  void check(cudaStream_t stream) const;

  [[nodiscard]] const PlanArrays& arrays(int rank) const;
  // Device memory, see PlanArgs.
  [[nodiscard]] const std::int32_t* in_order() const { return args_.in_order; }
  [[nodiscard]] const std::int32_t* owner_start() const { return args_.owner_start; }
  // Elements of row_sources and tiles that any routing may use.
  [[nodiscard]] std::int64_t max_rows(int rank) const;
  [[nodiscard]] std::int64_t max_tiles(int rank) const;

 private:
  void place_arrays(const Placement& placement,
                    std::span<const std::vector<std::int32_t>> tile_orders);

  const SymmetricMemory& memory_;
  PlanShape shape_;
  RankRange local_;
  std::vector<int> local_experts_;  // [num_ranks]
  PlanArgs args_{};
  std::size_t shared_bytes_ = 0;
  int resident_blocks_ = 0;
  std::byte* private_ = nullptr;
};

}  // namespace uniep::cuda
