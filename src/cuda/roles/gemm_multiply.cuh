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

template <KernelConfig kConfig, int kN>
__device__ __forceinline__ void multiply_tile(SharedStorage& shared, Accumulator& acc,
                                              PipeCursor& cursor, int num_k_tiles, int consumer,
                                              int lane) {
  UNIEP_UNROLL for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0F;
  int previous = -1;
  UNIEP_NO_UNROLL for (int k_tile = 0; k_tile < num_k_tiles; ++k_tile) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[cursor.stage]), cursor.parity);
    const SharedStorage::PipeStage& stage = shared.stages[cursor.stage];
    const std::uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(stage.a[consumer]));
    const std::uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(stage.b[0]));
    ptx::wgmma_fence();
    UNIEP_UNROLL for (int step = 0; step < kTileK / 16; ++step) {
      ptx::Wgmma<kN, kConfig.a, kConfig.b>::mma(acc, a + step * ptx::kDescriptorStep<kConfig.a>,
                                                b + step * ptx::kDescriptorStep<kConfig.b>,
                                                1);
    }
    ptx::wgmma_commit();
    // One tile of k stays in flight; the one before it is finished, and its stage free.
    ptx::wgmma_wait<1>();
    if (previous >= 0) release_stage(shared, previous, lane);
    previous = cursor.stage;
    cursor.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_pin<kN / 2>(acc);
  if (previous >= 0) release_stage(shared, previous, lane);
}

// Passes over stages that hold nothing for this warpgroup, so that every cursor stays in step.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, PipeCursor& cursor,
                                          int num_k_tiles, int lane) {
  for (int k_tile = 0; k_tile < num_k_tiles; ++k_tile) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.full[cursor.stage]), cursor.parity);
    release_stage(shared, cursor.stage, lane);
    cursor.advance();
  }
}

}  // namespace uniep::cuda
