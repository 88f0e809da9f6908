// SPDX-License-Identifier: Apache-2.0
// What the two fused kernels have in common: who a block is, and how an operation ends.
#pragma once

#include "cuda/kernels/grouped_gemm.cuh"
#include "cuda/roles/arrival.cuh"
#include "cuda/roles/move_rows.cuh"

namespace uniep::cuda {

static_assert(32 * kFusedWarps == kNumThreads);

[[nodiscard]] __device__ __forceinline__ int fused_local_rank(const FusedShape& fused) {
  return static_cast<int>(blockIdx.x) / 2 % fused.num_local_ranks;
}

// Mover::block counts the blocks of the rank, which are neighbours in pairs.
[[nodiscard]] __device__ __forceinline__ Mover make_fused_mover(const MoveShape& shape,
                                                                const FusedShape& fused) {
  const int cluster = static_cast<int>(blockIdx.x) / 2;
  const int rank = shape.first_rank + cluster % fused.num_local_ranks;
  return {shape,
          rank,
          cluster / fused.num_local_ranks * 2 + static_cast<int>(blockIdx.x) % 2,
          static_cast<int>(threadIdx.x),
          static_cast<int>(threadIdx.x) / 32,
          static_cast<int>(threadIdx.x) % 32,
          control_of(shape.group, rank).epoch + 1};
}

// Among the threads of the consumers.
__device__ __forceinline__ void sync_consumers() {
  ptx::named_barrier_sync(1 + kNumConsumers, 128 * kNumConsumers);
}

// The consumers' threads call it when nobody else of the block needs the operation's memory. The
// rank's last block to come ends the operation.
__device__ inline void end_fused(const Mover& m, const FusedShape& fused, const FusedWords& words,
                                 const SharedStorage& shared, bool is_combine) {
  sync_consumers();
  if (m.warp != 0 || *static_cast<const volatile std::uint32_t*>(&shared.failed) != 0) return;
  bool is_last = false;
  if (m.lane == 0) {
    __threadfence_system();
    const auto blocks = static_cast<std::uint64_t>(fused.clusters_per_rank) * 2;
    is_last = count_in_epoch<kCountShift>(words.blocks, m.epoch, 1) + 1 == blocks;
    __threadfence_system();
  }
  if (__ballot_sync(kWholeWarp, is_last) == 0) return;
  RankControl& control = control_of(m.shape.group, m.rank);
  if (is_combine) {
    const int blocks = m.shape.blocks_per_rank;
    for (int i = m.lane; i < m.shape.group.num_ranks * blocks; i += 32) {
      auto* const consumed = m.region<std::uint64_t>(i / blocks, m.shape.regions.consumed);
      ptx::store_relaxed_system(&consumed[m.rank * kMaxBlocksPerRank + i % blocks], m.epoch);
    }
    if (m.lane == 0) control.last_combine = m.epoch;
  }
  if (m.lane == 0) control.epoch = m.epoch;
}

}  // namespace uniep::cuda
