// SPDX-License-Identifier: Apache-2.0
// gemm2 or dgrad1 and combine in one launch: results leave for their tokens' ranks as tiles finish,
// and when all ranks' are home every block adds up tokens.
#include "cuda/fused_args.hpp"
#include "cuda/kernels/fused.cuh"
#include "cuda/launch.hpp"
#include "cuda/roles/combine_roles.cuh"
#include "cuda/roles/home_epilogue.cuh"

namespace uniep::cuda {
namespace {

// The consumers of a block have finished `tiles` tiles. The rank's last block to say so tells all
// ranks, its own included, that their results are home.
__device__ void count_tiles(const Mover& m, const FusedWords& words, SharedStorage& shared,
                            std::uint32_t tiles, std::uint32_t all_tiles) {
  sync_consumers();
  if (m.thread != 0) return;
  if (ptx::load_relaxed_system(&control_of(m.shape.group, m.rank).abort_word) != 0) {
    *static_cast<volatile std::uint32_t*>(&shared.failed) = 1;  // nothing counts in it
    return;
  }
  const std::uint64_t expected = std::uint64_t{all_tiles} * 2;  // both blocks of a cluster count
  bool is_last = m.block == 0;
  if (expected != 0) {
    __threadfence_system();
    is_last =
        tiles != 0 && count_in_epoch<kCountShift>(words.tiles, m.epoch, tiles) + tiles == expected;
  }
  if (!is_last) return;
  __threadfence_system();
  for (int i = 0; i < m.shape.group.num_ranks; ++i) {
    auto* const returned = m.region<std::uint64_t>(i, m.shape.regions.returned);
    ptx::store_relaxed_system(&returned[m.rank * kMaxBlocksPerRank], m.epoch);
  }
}

// False, in all threads of the consumers, if the group is poisoned.
__device__ bool wait_for_results(const Mover& m, SharedStorage& shared) {
  if (m.thread < m.shape.group.num_ranks) {
    const auto* const returned = m.region<const std::uint64_t>(m.rank, m.shape.regions.returned);
    if (!wait_at_least(m.shape.group, &returned[m.thread * kMaxBlocksPerRank], m.epoch,
                       {m.rank, WaitStage::combine_rows, m.thread, -1})) {
      *static_cast<volatile std::uint32_t*>(&shared.failed) = 1;
    }
  }
  sync_consumers();
  return *static_cast<volatile std::uint32_t*>(&shared.failed) == 0;
}

template <ptx::Major kA, ptx::Major kB, Epilogue kEpilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kNumThreads, 1)
    fused_combine_kernel(const __grid_constant__ FusedCombineArgs args) {
  constexpr KernelConfig kConfig{kA, kB, kEpilogue};
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(ptx::dynamic_shared());
  const int local = fused_local_rank(args.fused);
  const CombineRank& mine = args.ranks[local];
  const KernelArgs& gemm = args.gemm[local];
  const FusedWords& words = args.words[local];
  const bool is_valid = mine.plan.counts->valid != 0;
  init_barriers(shared);
  if (is_valid) fill_groups<kConfig>(gemm, shared.groups);
  ptx::cluster_sync();  // barriers and groups stand, in both blocks
  const auto finish = [&](std::uint32_t tiles) {
    const Mover m = make_fused_mover(args.shape, args.fused);
    if (is_valid) {
      count_tiles(m, words, shared, tiles, count_tickets<kConfig>(gemm, shared.groups));
      if (!wait_for_results(m, shared)) return;
      constexpr int kWarps = 4 * kNumConsumers;
      const int workers = 2 * args.fused.clusters_per_rank * kWarps;
      for (std::int64_t token = m.block * kWarps + m.warp; token < mine.num_tokens;
           token += workers) {
        reduce_token<StoredBf16, 8>(m, mine, token);
      }
    }
    end_fused(m, args.fused, words, shared, true);
  };
  if (is_valid) {
    const Mover m = make_fused_mover(args.shape, args.fused);
    const TicketStart start{static_cast<std::uint32_t>(m.block / 2),
                            static_cast<std::uint32_t>(args.fused.clusters_per_rank), 0, false};
    const RowsHome context{
        {args.shape, mine.plan.row_sources, args.y_rows[local], mine.d_weight_rows, m.rank}};
    multiply_roles<kConfig>(gemm, shared, m.block % 2, start, NoWait{}, context, finish);
  } else if (threadIdx.x < 128 * kNumConsumers) {
    finish(0);
  }
  ptx::cluster_sync();  // the peer may still write into this block's stages and barriers
}

template <KernelConfig kConfig>
cudaError_t launch_kernel(const FusedCombineArgs& args, cudaStream_t stream) {
  return launch_clusters(fused_combine_kernel<kConfig.a, kConfig.b, kConfig.epilogue>,
                         2 * args.fused.clusters_per_rank * args.fused.num_local_ranks, kNumThreads,
                         sizeof(SharedStorage), stream, args);
}

}  // namespace

cudaError_t launch_fused_combine(Pass pass, const FusedCombineArgs& args, cudaStream_t stream) {
  return pass == Pass::forward ? launch_kernel<kFpropHome>(args, stream)
                               : launch_kernel<kDgradHome>(args, stream);
}

}  // namespace uniep::cuda
