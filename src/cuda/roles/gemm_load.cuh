// SPDX-License-Identifier: Apache-2.0
// The loading role: one thread that fills pipe stages by TMA, never more than the ring ahead of the
// consumers, and straight on across tiles and experts.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda/ptx/tma.hpp"
#include "cuda/sched/tickets.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

inline constexpr std::uint16_t kBothBlocks = 3;

// Where a box of this tile begins in a 3-d tensor map: k-major boxes have k innermost.
template <ptx::Major kMajor>
__device__ __forceinline__ void load_box(std::uint32_t destination, const CUtensorMap* map,
                                         std::uint32_t barrier, bool multicast, int mn, int k,
                                         int outer) {
  const int c0 = kMajor == ptx::Major::k ? k : mn;
  const int c1 = kMajor == ptx::Major::k ? mn : k;
  if (multicast) {
    ptx::tma_load_3d_multicast(destination, map, barrier, kBothBlocks, c0, c1, outer);
  } else {
    ptx::tma_load_3d(destination, map, barrier, c0, c1, outer);
  }
}

// A box of 64 rows of w1 as 4 x (8 gate rows, 8 up rows): a thread's accumulator then holds gate
// and up of the same column. `m` counts rows in that interleaved order.
__device__ __forceinline__ void load_gate_up_box(std::uint32_t destination, const CUtensorMap* map,
                                                 std::uint32_t barrier, bool multicast, int m,
                                                 int k, int expert) {
  if (multicast) {
    ptx::tma_load_5d_multicast(destination, map, barrier, kBothBlocks, k, m / 16, expert);
  } else {
    ptx::tma_load_5d(destination, map, barrier, k, m / 16, expert);
  }
}

template <KernelConfig kConfig>
__device__ __forceinline__ void load_tile(const KernelArgs& args, SharedStorage& shared,
                                          TileReader<kConfig>& reader, const Tile& tile,
                                          PipeCursor& cursor, int block_rank) {
  const Problem& problem = args.problems[tile.problem];
  const int boxes_a = min(kBoxesA, ceil_div(problem.m_extent - tile.m0, 64));
  const int boxes_b = max(0, ceil_div(tile.num_n, 64));
  // Token rows are addressed in the whole buffer, weights by expert.
  const int n_first = tile.n0 + (kConfig.rows_on_n() ? tile.row_start : 0);
  const int k_first = kConfig.rows_on_n() ? 0 : tile.row_start;
  const int expert = kConfig.rows_on_n() ? tile.expert : 0;
  const int want_at = max(0, tile.num_k_tiles - kWantAhead);
  if (tile.num_k_tiles == 0) reader.want_next();
  UNIEP_NO_UNROLL for (int k_tile = 0; k_tile < tile.num_k_tiles; ++k_tile) {
    if (k_tile == want_at) reader.want_next();
    const int k = k_first + k_tile * kTileK;
    SharedStorage::PipeStage& stage = shared.stages[cursor.stage];
    const std::uint32_t full = ptx::shared_address(&shared.full[cursor.stage]);
    ptx::mbarrier_wait(ptx::shared_address(&shared.empty[cursor.stage]), cursor.parity ^ 1U);
    ptx::mbarrier_arrive_expect_tx(full, (boxes_a + boxes_b) * ptx::kBoxBytes);
    UNIEP_UNROLL for (int i = 0; i < kBoxesA; ++i) {
      if (i >= boxes_a || (!tile.shares_b && i % 2 != block_rank)) continue;
      const std::uint32_t destination = ptx::shared_address(stage.a[i]);
      const int m = tile.m0 + 64 * i;
      if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
        load_gate_up_box(destination, &problem.a, full, !tile.shares_b, m, k, expert);
      } else {
        load_box<kConfig.a>(destination, &problem.a, full, !tile.shares_b, m, k, expert);
      }
    }
    UNIEP_UNROLL for (int i = 0; i < kBoxesB; ++i) {
      if (i >= boxes_b || (tile.shares_b && i % 2 != block_rank)) continue;
      load_box<kConfig.b>(ptx::shared_address(stage.b[i]), &problem.b, full, tile.shares_b,
                          n_first + 64 * i, k, 0);
    }
    cursor.advance();
  }
}

// Calls wait(tile) before the first load of each tile.
template <KernelConfig kConfig, typename Wait>
__device__ __forceinline__ void load_role(const KernelArgs& args, SharedStorage& shared,
                                          TileReader<kConfig> reader, int block_rank,
                                          const Wait& wait) {
  PipeCursor cursor;
  Tile tile;
  while (reader.next(tile)) {
    wait(tile);
    load_tile<kConfig>(args, shared, reader, tile, cursor, block_rank);
  }
}

}  // namespace uniep::cuda
