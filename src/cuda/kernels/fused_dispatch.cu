// SPDX-License-Identifier: Apache-2.0
// Dispatch and the product of its rows in one launch, gemm1 with activation or dgrad2: some blocks
// begin by moving rows, the others multiply tiles whose rows are there, and the movers join them.
#include "cuda/fused_args.hpp"
#include "cuda/kernels/fused.cuh"
#include "cuda/launch.hpp"
#include "cuda/roles/ordered_dispatch_roles.cuh"

namespace uniep::cuda {
namespace {

// All threads of the block agree on the outcome: false if the group is poisoned.
__device__ bool move(const Mover& m, const FusedDispatchArgs& args, const DispatchRank& mine,
                     const FusedWords& words, SendTable& table) {
  if (!may_start(m)) return false;
  fill_send_table(m, args, mine, table);
  if (!wait_until_consumed(m, kNumThreads)) return false;
  const int blocks = args.fused.moving_blocks;
  clear_padding<uint4>(m, mine, m.warp * blocks + m.block, kFusedWarps * blocks);
  const bool is_alone = args.shape.group.num_ranks == 1;
  const int pushers = is_alone ? kFusedWarps : args.shape.push_warps;
  if (m.warp < pushers) {
    push_role(m, mine, words, table, m.warp * blocks + m.block, pushers * blocks);
  }
  const bool failed = !is_alone && !relay_role(m, mine, words, table);
  return __syncthreads_or(failed) == 0;
}

template <ptx::Major kA, ptx::Major kB, Epilogue kEpilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kNumThreads, 1)
    fused_dispatch_kernel(const __grid_constant__ FusedDispatchArgs args) {
  constexpr KernelConfig kConfig{kA, kB, kEpilogue};
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  const int local = fused_local_rank(args.fused);
  const DispatchRank& mine = args.ranks[local];
  const KernelArgs& gemm = args.gemm[local];
  const FusedWords& words = args.words[local];
  const bool is_valid = mine.plan.counts->valid != 0;
  init_barriers(shared);
  if (is_valid) fill_groups<kConfig>(gemm, shared.groups);
  ptx::cluster_sync();  // barriers and groups stand, in both blocks
  const Mover m = make_fused_mover(args.shape, args.fused);
  const bool is_mover = m.block < args.fused.moving_blocks;
  if (is_valid && is_mover) {
    if (!move(m, args, mine, words, *reinterpret_cast<SendTable*>(shared.stages)) &&
        m.thread == 0) {
      shared.failed = 1;
    }
    ptx::fence_proxy_async_shared();  // the table's memory is the pipe's from now on
    ptx::cluster_sync();
  }
  const auto finish = [&](std::uint32_t) {
    end_fused(make_fused_mover(args.shape, args.fused), args.fused, words, shared, false);
  };
  if (is_valid) {
    const int moving = args.fused.moving_blocks / 2;
    const int cluster = m.block / 2;
    const TicketStart start{static_cast<std::uint32_t>(cluster - moving),
                            static_cast<std::uint32_t>(args.fused.clusters_per_rank - moving),
                            static_cast<std::uint32_t>(moving), is_mover};
    const RowWait wait{args.shape.group, words.rows, m.epoch, m.rank};
    multiply_roles<kConfig>(gemm, shared, m.block % 2, start, wait, RowsArriving{}, finish);
  } else if (m.thread < 128 * kNumConsumers) {
    finish(0);
  }
  ptx::cluster_sync();  // the peer may still write into this block's stages and barriers
}

template <KernelConfig kConfig>
cudaError_t launch_kernel(const FusedDispatchArgs& args, cudaStream_t stream) {
  return launch_clusters(fused_dispatch_kernel<kConfig.a, kConfig.b, kConfig.epilogue>,
                         2 * args.fused.clusters_per_rank * args.fused.num_local_ranks, kNumThreads,
                         sizeof(SharedStorage), stream, args);
}

}  // namespace

cudaError_t launch_fused_dispatch(Pass pass, const FusedDispatchArgs& args, cudaStream_t stream) {
  return pass == Pass::forward ? launch_kernel<kFpropSwiglu>(args, stream)
                               : launch_kernel<kDgradF32>(args, stream);
}

}  // namespace uniep::cuda
