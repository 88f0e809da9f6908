// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM kernel: persistent clusters of two blocks; in each block one warpgroup loads
// (and, in the first, draws the tickets of tiles) and two multiply and drain. No host knows the row
// counts: the tile walk reads them on the device.
#pragma once

#include <cuda_runtime.h>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/launch.hpp"
#include "cuda/roles/gemm_epilogue.cuh"
#include "cuda/roles/gemm_load.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

inline constexpr int kNumThreads = 128 * (1 + kNumConsumers);
// 384 threads enter with 168 registers each; the loader's share goes to the accumulators.
inline constexpr int kLoaderRegisters = 40;
inline constexpr int kConsumerRegisters = 232;

__device__ __forceinline__ void init_barriers(SharedStorage& shared) {
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kNumPipeStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), 2 * 4 * kNumConsumers);
    }
    for (int slot = 0; slot < kNumTickets; ++slot) {
      ptx::mbarrier_init(ptx::shared_address(&shared.ticket_full[slot]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.ticket_read[slot]), 2 * 4 * kNumConsumers);
    }
    ptx::mbarrier_init(ptx::shared_address(&shared.ticket_wanted), 2);
    shared.failed = 0;
    ptx::mbarrier_init_fence();
  }
}

// Nothing to wait for.
struct NoWait {
  __device__ __forceinline__ void operator()(const Tile&) const {}
};

// The roles of one block after its barriers and groups stand. finish(tiles) is called by the
// consumers' threads with the number of tiles that the cluster had.
template <KernelConfig kConfig, typename Wait, typename Context, typename Finish>
__device__ __forceinline__ void multiply_roles(const KernelArgs& args, SharedStorage& shared,
                                               int block_rank, const TicketStart& start,
                                               const Wait& wait, const Context& context,
                                               const Finish& finish) {
  const TileReader<kConfig> reader{shared, {args, shared.groups, block_rank}, {}};
  // The same in all lanes, and the compiler shall know it.
  const int warpgroup = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == kNumConsumers) {
    ptx::setmaxnreg_dec<kLoaderRegisters>();
    const int warp = __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x % 128 / 32), 0);
    if (warp == 0 && ptx::elect_one()) {
      load_role<kConfig>(args, shared, reader, block_rank, wait);
    } else if (warp == 1 && block_rank == 0 && ptx::elect_one()) {
      draw_role<kConfig>(args, shared, start);
    }
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    finish(consume_role<kConfig>(args, shared, reader, warpgroup, context));
  }
}

// Plain enums, since nvcc 13.0 cannot name a kernel by a class-type parameter in its host stub.
template <ptx::Major kA, ptx::Major kB, Epilogue kEpilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kNumThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelArgs args) {
  constexpr KernelConfig kConfig{kA, kB, kEpilogue};
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  init_barriers(shared);
  fill_groups<kConfig>(args, shared.groups);
  ptx::cluster_sync();  // barriers and groups stand, in both blocks

  const int block_rank = static_cast<int>(ptx::cluster_block_rank());
  const TicketStart start{blockIdx.x / 2, gridDim.x / 2, 0, false};
  multiply_roles<kConfig>(args, shared, block_rank, start, NoWait{}, RowsThere{},
                          [](std::uint32_t) {});
  ptx::cluster_sync();  // the peer may still write into this block's stages and barriers
}

// Launches on num_blocks blocks, an even number; returns CUDA's word on the launch.
template <KernelConfig kConfig>
cudaError_t launch_grouped_gemm(const KernelArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_clusters(grouped_gemm_kernel<kConfig.a, kConfig.b, kConfig.epilogue>, num_blocks,
                         kNumThreads, sizeof(SharedStorage), stream, args);
}

}  // namespace uniep::cuda
