// SPDX-License-Identifier: Apache-2.0
// The multiplying role: a warpgroup that multiplies 64 values of m by the tile's values of n, each
// element one chain of k16 steps, k ascending, in one fp32 accumulator.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/cluster.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda/ptx/tma.hpp"
#include "cuda/ptx/wgmma.hpp"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

using Accumulator = float[kTileN / 2];

// This warp is done with a pipe stage: lanes 0 and 1 tell the loaders of blocks 0 and 1.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane) {
  if (lane < 2) {
    const std::uint32_t empty = ptx::shared_address(&shared.empty[stage]);
    ptx::mbarrier_arrive_cluster(ptx::map_shared(empty, lane));
  }
}

// The last stages of a tile, which a warpgroup keeps after its products: their A boxes are read by
// nobody else, so it drains its accumulator through them, and through its staging buffers last.
// They go back during the next tile's first products, while two other stages feed the next. Worth
// it for bf16 gradients only: fp32 tiles are too large, and the stages would be missing for as long
// as the copies take.
template <KernelConfig kConfig>
inline constexpr int kNumHeldStages = kConfig.epilogue == Epilogue::grad_bf16 ? kMaxHeldStages : 0;

struct HeldStages {
  int first = 0;
  int count = 0;
  bool staged_last = false;  // the last copies are from all of the staging buffers

  __device__ __forceinline__ void give_back(SharedStorage& shared, bool is_leader) {
    if (is_leader) {
      if (staged_last) {
        ptx::tma_wait_read<kNumStagingBuffers>();
      } else {
        ptx::tma_wait_read<0>();
      }
      for (int i = 0; i < count; ++i) {
        const std::uint32_t empty =
            ptx::shared_address(&shared.empty[(first + i) % kNumPipeStages]);
        ptx::mbarrier_arrive_cluster(ptx::map_shared(empty, 0), 4);  // for all warps
        ptx::mbarrier_arrive_cluster(ptx::map_shared(empty, 1), 4);
      }
    }
    count = 0;
  }
};

// The products of one pipe stage, once it is full. The first of a tile starts the chain.
template <KernelConfig kConfig, int kN, bool kFirst>
__device__ __forceinline__ void multiply_stage(SharedStorage& shared, Accumulator& acc,
                                               const PipeCursor& cursor, int consumer) {
  using Product = ptx::Wgmma<kN, kConfig.a, kConfig.b>;
  ptx::mbarrier_wait(ptx::shared_address(&shared.full[cursor.stage]), cursor.parity);
  const SharedStorage::PipeStage& stage = shared.stages[cursor.stage];
  const std::uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(stage.a[consumer]));
  const std::uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(stage.b[0]));
  ptx::wgmma_fence();
  UNIEP_UNROLL for (int step = 0; step < kTileK / 16; ++step) {
    const std::uint64_t a_step = a + step * ptx::kDescriptorStep<kConfig.a>;
    const std::uint64_t b_step = b + step * ptx::kDescriptorStep<kConfig.b>;
    if (kFirst && step == 0) {
      Product::start(acc, a_step, b_step);
    } else {
      Product::mma(acc, a_step, b_step);
    }
  }
  ptx::wgmma_commit();
}

template <KernelConfig kConfig, int kN>
__device__ __forceinline__ void multiply_tile(SharedStorage& shared, Accumulator& acc,
                                              PipeCursor& cursor, HeldStages& held, int num_k_tiles,
                                              int consumer, int warp, int lane) {
  const bool is_leader = warp == 0 && lane == 0;
  if (!kConfig.rows_on_n() && num_k_tiles == 0) {  // an expert without rows: its gradient is zero
    held.give_back(shared, is_leader);
    UNIEP_UNROLL for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0F;
    return;
  }
  multiply_stage<kConfig, kN, true>(shared, acc, cursor, consumer);
  held.give_back(shared, is_leader);
  held.count = min(kNumHeldStages<kConfig>, num_k_tiles);
  int previous = cursor.stage;
  cursor.advance();
  UNIEP_NO_UNROLL for (int k_tile = 1; k_tile < num_k_tiles; ++k_tile) {
    multiply_stage<kConfig, kN, false>(shared, acc, cursor, consumer);
    // One stage's products stay in flight; those before it are finished, and their stage is free.
    ptx::wgmma_wait<1>();
    if (k_tile <= num_k_tiles - kNumHeldStages<kConfig>) release_stage(shared, previous, lane);
    previous = cursor.stage;
    cursor.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin<kN / 2>(acc);
  if (kNumHeldStages<kConfig> == 0) release_stage(shared, previous, lane);
  held.first = (previous + 1 + kNumPipeStages - held.count) % kNumPipeStages;
}

// Passes over stages that hold nothing for this warpgroup, so that every cursor stays in step.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, PipeCursor& cursor,
                                          int num_k_tiles, int lane) {
  for (int k_tile = 0; k_tile < num_k_tiles; ++k_tile) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[cursor.stage]), cursor.parity);
    __syncwarp();  // nobody waits for this phase any more
    release_stage(shared, cursor.stage, lane);
    cursor.advance();
  }
}

}  // namespace uniep::cuda
