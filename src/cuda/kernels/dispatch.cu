// SPDX-License-Identifier: Apache-2.0
// Dispatch of one operation: every token's row to the ranks of its experts, and there to the places
// that the plan gives it. Some warps of each block push, the others relay what arrives; neither
// waits for the other's work on its own rank.
#include "cuda/launch.hpp"
#include "cuda/roles/dispatch_roles.cuh"

namespace uniep::cuda {
namespace {

__device__ void publish_num_tokens(const Mover& m, const DispatchRank& mine) {
  const MoveShape& shape = m.shape;
  if (m.block != 0 || m.thread >= shape.group.num_ranks || m.thread == m.rank) return;
  m.region<std::int64_t>(m.thread, shape.regions.num_tokens)[m.rank] = mine.num_tokens;
  ptx::store_release_system(&m.region<std::uint64_t>(m.thread, shape.regions.tokens_ready)[m.rank],
                            m.epoch);
}

__device__ int chunks_of(const Mover& m, std::int64_t num_tokens) {
  return static_cast<int>((num_tokens + m.shape.chunk - 1) / m.shape.chunk);
}

// Chunks of all sources in turn, as they are likely to arrive. False if the group is poisoned.
template <typename Unit>
__device__ bool relay(const Mover& m, const DispatchRank& mine, int worker, int workers) {
  const MoveShape& shape = m.shape;
  const int num_ranks = shape.group.num_ranks;
  bool failed = false;
  std::int64_t tokens = 0;  // of the source that is this lane's number
  if (m.lane < num_ranks && m.lane != m.rank) {
    const auto* ready = m.region<const std::uint64_t>(m.rank, shape.regions.tokens_ready);
    failed = !wait_at_least(shape.group, &ready[m.lane], m.epoch,
                            {m.rank, WaitStage::dispatch_tokens, m.lane, -1});
    if (!failed) {
      tokens = __ldcg(reinterpret_cast<const long long*>(
          m.region<const std::int64_t>(m.rank, shape.regions.num_tokens) + m.lane));
    }
  }
  if (__ballot_sync(kWholeWarp, failed) != 0) return false;
  int most = 0;
  for (int source = 0; source < num_ranks; ++source) {
    const int chunks = chunks_of(m, __shfl_sync(kWholeWarp, tokens, source));
    most = chunks > most ? chunks : most;
  }
  const int peers = num_ranks - 1;
  for (int i = worker; i < most * peers; i += workers) {
    const int chunk = i / peers;
    const int source = (m.rank + 1 + i % peers) % num_ranks;
    const std::int64_t source_tokens = __shfl_sync(kWholeWarp, tokens, source);
    if (chunk >= chunks_of(m, source_tokens)) continue;
    if (!relay_chunk<Unit>(m, mine, source, chunk, source_tokens)) return false;
  }
  return true;
}

template <typename Unit>
__global__ void __launch_bounds__(kMoveThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArgs args) {
  const Mover m = make_mover(args.shape);
  if (!may_start(m)) return;
  const DispatchRank& mine = args.ranks[m.rank - args.shape.first_rank];
  bool failed = false;
  if (mine.plan.counts->valid != 0) {
    if (!wait_until_consumed(m, kMoveThreads)) return;
    publish_num_tokens(m, mine);
    const bool alone = args.shape.group.num_ranks == 1;
    const int pushers = alone ? kMoveWarps : args.shape.push_warps;
    const int blocks = args.shape.blocks_per_rank;
    if (m.warp < pushers) {
      const int chunks = chunks_of(m, mine.num_tokens);
      for (int chunk = m.warp * blocks + m.block; chunk < chunks; chunk += pushers * blocks) {
        push_chunk<Unit>(m, mine, chunk);
      }
      if (alone) clear_padding<Unit>(m, mine, m.warp_of_rank(), m.warps_of_rank());
    } else {
      const int relays = kMoveWarps - pushers;
      const int worker = (m.warp - pushers) * blocks + m.block;
      clear_padding<Unit>(m, mine, worker, relays * blocks);
      failed = !relay<Unit>(m, mine, worker, relays * blocks);
    }
  }
  end_operation(m, failed, WaitStage::dispatch_end, false);
}

}  // namespace

cudaError_t launch_dispatch(const DispatchArgs& args, int num_local_ranks, cudaStream_t stream) {
  const int blocks = num_local_ranks * args.shape.blocks_per_rank;
  auto* const kernel =
      args.shape.row_bytes % 16 == 0 ? dispatch_kernel<uint4> : dispatch_kernel<std::uint16_t>;
  return launch(kernel, true, blocks, kMoveThreads, 0, stream, args);
}

cudaError_t count_resident_dispatch_blocks(int* blocks) {
  int wide = 0, narrow = 0;
  cudaError_t error = count_resident_blocks(dispatch_kernel<uint4>, kMoveThreads, 0, &wide);
  if (error == cudaSuccess) {
    error = count_resident_blocks(dispatch_kernel<std::uint16_t>, kMoveThreads, 0, &narrow);
  }
  *blocks = wide < narrow ? wide : narrow;
  return error;
}

}  // namespace uniep::cuda
