// SPDX-License-Identifier: Apache-2.0
// The consumer role: a warpgroup multiplies a tile, then stores its accumulator. Token rows are
// stored in blocks of 64, which start where the 64-row alignment of experts says: rows past the
// expert's last are stored as zeros up to the next multiple of 64, and nothing beyond is touched.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/roles/gemm_multiply.cuh"
#include "cuda/roles/gemm_store.cuh"
#include "cuda/sched/tickets.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

// One tile of kN values of n, from the first k to the last store. Each width has its own code from
// end to end: the accumulators of different widths then never have to meet in the same registers.
template <KernelConfig kConfig, int kN>
__device__ __forceinline__ void consume_tile(const Problem& problem, const Tile& tile,
                                             SharedStorage& shared, PipeCursor& cursor,
                                             const StoreLanes& at) {
  Accumulator acc;
  RowWeights weights;
  if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    weights.load(problem.row_weights, tile, at.lane);
  }
  multiply_tile<kConfig, kN>(shared, acc, cursor, tile.num_k_tiles, at.consumer, at.lane);
  if constexpr (kConfig.epilogue == Epilogue::rows_bf16) {
    store_rows_bf16<kN>(problem, tile, acc, at);
  } else if constexpr (kConfig.epilogue == Epilogue::rows_f32) {
    store_rows_f32<kN>(problem, tile, acc, at);
  } else if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    store_swiglu<kN>(problem, tile, acc, weights, at);
  } else if constexpr (kConfig.epilogue == Epilogue::grad_bf16) {
    store_grad_bf16<kN>(problem, tile, acc, at);
  } else {
    store_grad_f32<kN>(problem, tile, acc, at);
  }
}

// The consumer warpgroup: multiply, store, next tile. Token rows come in widths of 32; where n lies
// along a swizzled row, in whole boxes.
template <KernelConfig kConfig>
__device__ __forceinline__ void consume_role(const KernelArgs& args, SharedStorage& shared,
                                             TileReader<kConfig> reader, int consumer) {
  constexpr int kStep = kConfig.b == ptx::Major::k ? 32 : 64;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const StoreLanes at{shared, consumer, static_cast<int>(threadIdx.x / 32 % 4), lane};
  PipeCursor cursor;
  Tile tile;
  while (reader.next(tile)) {
    reader.release(lane);
    const Problem& problem = args.problems[tile.problem];
    const bool active = tile.m0 + 64 * consumer < problem.m_extent;
    switch (active && tile.num_n > 0 ? ceil_div(tile.num_n, kStep) * kStep : 0) {
#define UNIEP_CASE(n)                                              \
  case n:                                                          \
    if constexpr (n % kStep == 0) {                                \
      consume_tile<kConfig, n>(problem, tile, shared, cursor, at); \
    }                                                              \
    break
      UNIEP_CASE(32);
      UNIEP_CASE(64);
      UNIEP_CASE(96);
      UNIEP_CASE(128);
      UNIEP_CASE(160);
      UNIEP_CASE(192);
      UNIEP_CASE(224);
      UNIEP_CASE(256);
#undef UNIEP_CASE
      default:
        skip_tile(shared, cursor, tile.num_k_tiles, lane);
    }
  }
}

}  // namespace uniep::cuda
