// SPDX-License-Identifier: Apache-2.0
// Combine of one operation: results go home to the ranks of their tokens, or are fetched from
// there, and each token's choices are added in ascending order.
#include "cuda/launch.hpp"
#include "cuda/roles/combine_roles.cuh"

namespace uniep::cuda {
namespace {

// One signal of this block to every peer. What the block's threads did before becomes visible.
__device__ void signal_peers(const Mover& m, std::int64_t offset) {
  __syncthreads();
  if (m.thread >= m.shape.group.num_ranks || m.thread == m.rank) return;
  ptx::store_release_system(
      &m.region<std::uint64_t>(m.thread, offset)[m.rank * kMaxBlocksPerRank + m.block], m.epoch);
}

__device__ bool wait_for_results(const Mover& m) {
  const MoveShape& shape = m.shape;
  const auto* const returned = m.region<const std::uint64_t>(m.rank, shape.regions.returned);
  bool failed = false;
  for (int i = m.thread; i < shape.group.num_ranks * shape.blocks_per_rank; i += kMoveThreads) {
    const int peer = i / shape.blocks_per_rank;
    const int block = i % shape.blocks_per_rank;
    if (peer == m.rank || failed) continue;
    failed = !wait_at_least(shape.group, &returned[peer * kMaxBlocksPerRank + block], m.epoch,
                            {m.rank, WaitStage::combine_rows, peer, block});
  }
  return __syncthreads_or(failed) == 0;
}

template <typename Unit, typename Storage, int Count>
__global__ void __launch_bounds__(kMoveThreads, 1)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  const Mover m = make_mover(args.shape);
  if (!may_start(m)) return;
  const CombineRank& mine = args.ranks[m.rank - args.shape.first_rank];
  if (mine.plan.counts->valid != 0) {
    if (!args.shape.pull_combine) return_rows<Unit>(m, mine);
    signal_peers(m, args.shape.regions.returned);
    if (!wait_for_results(m)) return;
    for (std::int64_t token = m.warp_of_rank(); token < mine.num_tokens;
         token += m.warps_of_rank()) {
      reduce_token<Storage, Count>(m, mine, token);
    }
  }
  signal_peers(m, args.shape.regions.consumed);
  end_operation(m, false, WaitStage::combine_end, true);
}

// Calls body with the kernel for rows of these bytes and elements.
template <typename Body>
cudaError_t with_kernel(std::int64_t row_bytes, std::int32_t element_bytes, Body body) {
  const bool wide = row_bytes % 16 == 0;
  if (element_bytes == 2) {
    return body(wide ? combine_kernel<uint4, StoredBf16, 8>
                     : combine_kernel<std::uint16_t, StoredBf16, 1>);
  }
  return body(wide ? combine_kernel<uint4, float, 4> : combine_kernel<std::uint16_t, float, 1>);
}

}  // namespace

cudaError_t launch_combine(const CombineArgs& args, int num_local_ranks, cudaStream_t stream) {
  return with_kernel(args.shape.row_bytes, args.shape.element_bytes, [&](auto* kernel) {
    return launch(kernel, true, num_local_ranks * args.shape.blocks_per_rank, kMoveThreads, 0,
                  stream, args);
  });
}

cudaError_t count_resident_combine_blocks(int* blocks) {
  *blocks = 0;
  for (const std::int32_t element_bytes : {2, 4}) {
    for (const std::int64_t row_bytes : {16, 4}) {
      int some = 0;
      const cudaError_t error = with_kernel(row_bytes, element_bytes, [&](auto* kernel) {
        return count_resident_blocks(kernel, kMoveThreads, 0, &some);
      });
      if (error != cudaSuccess) return error;
      *blocks = *blocks == 0 || some < *blocks ? some : *blocks;
    }
  }
  return cudaSuccess;
}

}  // namespace uniep::cuda
