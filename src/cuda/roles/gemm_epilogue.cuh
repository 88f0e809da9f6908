// SPDX-License-Identifier: Apache-2.0
// The epilogue role: from a warpgroup's accumulator through its staging buffers to global memory.
// Plain rows and gradients are stored by the warps themselves (gemm_store.cuh); what has two
// outputs or two boxes a block goes by TMA. Token rows are stored in blocks of 64, which start
// where the 64-row alignment of experts says: rows past the expert's last are stored as zeros up to
// the next multiple of 64, and nothing beyond is touched.
#pragma once

#include <cstdint>

#include "cuda/formulas.cuh"
#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/cluster.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda/ptx/stmatrix.hpp"
#include "cuda/ptx/tma.hpp"
#include "cuda/roles/gemm_multiply.cuh"
#include "cuda/roles/gemm_store.cuh"
#include "cuda/sched/tickets.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

// A warpgroup's view of itself and of its staging ring.
struct Drain {
  SharedStorage& shared;
  int consumer;
  int warp;  // 0 to 3
  int lane;
  int buffer = 0;

  __device__ __forceinline__ bool is_leader() const { return warp == 0 && lane == 0; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + consumer, 128); }

  // The next buffer, once the copies that last read it are done. Only the leader issues copies.
  __device__ __forceinline__ std::uint32_t acquire() {
    if (is_leader()) ptx::tma_wait_read<kNumStagingBuffers - 1>();
    sync();
    return ptx::shared_address(shared.staging[consumer][buffer]);
  }

  // After this the leader may copy from the buffer that acquire() gave, and must tma_commit() once.
  __device__ __forceinline__ void publish() {
    ptx::fence_proxy_async_shared();
    sync();
    buffer = (buffer + 1) % kNumStagingBuffers;
  }
};

// Blocks of [32 token rows, 64 m] fp32, as two boxes of 32 m.
template <int kN>
__device__ __forceinline__ void store_rows_f32(const Problem& problem, const Tile& tile,
                                               Accumulator& acc, Drain& drain) {
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    if (64 * block >= tile.num_n) continue;
    zero_padding<kN>(acc, block, tile.num_n, drain.lane);
    UNIEP_UNROLL for (int half = 0; half < 2; ++half) {
      const std::uint32_t buffer = drain.acquire();
      const std::uint32_t box = buffer + drain.warp / 2 * (ptx::kBoxBytes / 2);
      UNIEP_UNROLL for (int jj = 0; jj < 4; ++jj) {
        UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
          const int row = 8 * jj + 2 * (drain.lane % 4) + i % 2;
          const int m = 16 * (drain.warp % 2) + drain.lane / 4 + 8 * (i / 2);
          ptx::store_shared(swizzle128(box, row, m / 4) + m % 4 * 4,
                            acc[4 * (8 * block + 4 * half + jj) + i]);
        }
      }
      drain.publish();
      if (drain.is_leader()) {
        const int m = tile.m0 + 64 * drain.consumer;
        const int row = tile.row_start + tile.n0 + 64 * block + 32 * half;
        ptx::tma_store_3d(&problem.d, buffer, m, row, 0);
        ptx::tma_store_3d(&problem.d, buffer + ptx::kBoxBytes / 2, m + 32, row, 0);
        ptx::tma_commit();
      }
    }
  }
}

// The tile's top-k weights, spread over a warp: lane l holds those of token rows 64 b + 2 l and the
// next for b = 0 to 3. Loaded before the products, so that nobody waits for them afterwards.
struct RowWeights {
  float2 pairs[kTileN / 64];

  __device__ __forceinline__ void load(const float* weights, const Tile& tile, int lane) {
    const float* first = weights + tile.row_start + tile.n0;
    UNIEP_UNROLL for (int block = 0; block < kTileN / 64; ++block) {
      const int n = 64 * block + 2 * lane;
      pairs[block].x = n < tile.num_n ? first[n] : 0.0F;
      pairs[block].y = n + 1 < tile.num_n ? first[n + 1] : 0.0F;
    }
  }

  // The weights of this lane's two columns of accumulator group jj of a block.
  __device__ __forceinline__ float2 get(int block, int jj, int lane) const {
    const int source = 4 * jj + lane % 4;
    return {__shfl_sync(0xFFFFFFFFU, pairs[block].x, source),
            __shfl_sync(0xFFFFFFFFU, pairs[block].y, source)};
  }
};

// Blocks of [64 token rows, 32 columns of a]; h, if asked for, as two such blocks, gate and up.
template <int kN>
__device__ __forceinline__ void store_swiglu(const Problem& problem, const Tile& tile,
                                             Accumulator& acc, const RowWeights& weights,
                                             Drain& drain) {
  const int column = tile.m0 / 2 + 32 * drain.consumer;
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    if (64 * block >= tile.num_n) continue;
    zero_padding<kN>(acc, block, tile.num_n, drain.lane);
    const int first_row = tile.row_start + tile.n0 + 64 * block;
    std::uint32_t gate[8], up[8];
    UNIEP_UNROLL for (int jj = 0; jj < 8; ++jj) {
      const int j = 8 * block + jj;
      gate[jj] = pack_bf16(acc[4 * j], acc[4 * j + 1]);
      up[jj] = pack_bf16(acc[4 * j + 2], acc[4 * j + 3]);
    }
    const auto chunk_address = [&](std::uint32_t buffer, int jj) {
      return swizzle64(buffer, 8 * jj + drain.lane, drain.warp);
    };
    if (problem.write_h != 0) {
      const std::uint32_t buffer = drain.acquire();
      UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 4) {
        const std::uint32_t g[4] = {gate[jj], gate[jj + 1], gate[jj + 2], gate[jj + 3]};
        const std::uint32_t u[4] = {up[jj], up[jj + 1], up[jj + 2], up[jj + 3]};
        ptx::stmatrix_x4_trans(chunk_address(buffer, jj), g);
        ptx::stmatrix_x4_trans(chunk_address(buffer + ptx::kBoxBytes / 2, jj), u);
      }
      drain.publish();
      if (drain.is_leader()) {
        ptx::tma_store_3d(&problem.h, buffer, column, 0, first_row);
        ptx::tma_store_3d(&problem.h, buffer + ptx::kBoxBytes / 2, column, 1, first_row);
        ptx::tma_commit();
      }
    }
    const std::uint32_t buffer = drain.acquire();
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 4) {
      std::uint32_t a[4];
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const float2 weight = weights.get(block, jj + i, drain.lane);
        a[i] = pack_bf16(activation(first_of(gate[jj + i]), first_of(up[jj + i]), weight.x),
                         activation(second_of(gate[jj + i]), second_of(up[jj + i]), weight.y));
      }
      ptx::stmatrix_x4_trans(chunk_address(buffer, jj), a);
    }
    drain.publish();
    if (drain.is_leader()) {
      ptx::tma_store_3d(&problem.d, buffer, column, first_row, 0);
      ptx::tma_commit();
    }
  }
}

// One tile of kN values of n, from the first k to the last store. Each width has its own code from
// end to end: the accumulators of different widths then never have to meet in the same registers.
template <KernelConfig kConfig, int kN>
__device__ __forceinline__ void consume_tile(const Problem& problem, const Tile& tile,
                                             SharedStorage& shared, PipeCursor& cursor,
                                             Drain& drain) {
  Accumulator acc;
  RowWeights weights;
  if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    weights.load(problem.row_weights, tile, drain.lane);
  }
  multiply_tile<kConfig, kN>(shared, acc, cursor, tile.num_k_tiles, drain.consumer, drain.lane);
  if constexpr (kConfig.epilogue == Epilogue::rows_bf16) {
    store_rows_bf16<kN>(problem, tile, acc,
                        StoreLanes{shared, drain.consumer, drain.warp, drain.lane});
  } else if constexpr (kConfig.epilogue == Epilogue::rows_f32) {
    store_rows_f32<kN>(problem, tile, acc, drain);
  } else if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    store_swiglu<kN>(problem, tile, acc, weights, drain);
  } else if constexpr (kConfig.epilogue == Epilogue::grad_bf16) {
    store_grad_bf16<kN>(problem, tile, acc,
                        StoreLanes{shared, drain.consumer, drain.warp, drain.lane});
  } else {
    store_grad_f32<kN>(problem, tile, acc,
                       StoreLanes{shared, drain.consumer, drain.warp, drain.lane});
  }
}

// The consumer warpgroup: multiply, drain, next tile. Token rows come in widths of 32; where n lies
// along a swizzled row, in whole boxes.
template <KernelConfig kConfig>
__device__ __forceinline__ void consume_role(const KernelArgs& args, SharedStorage& shared,
                                             TileReader<kConfig> reader, int consumer) {
  constexpr int kStep = kConfig.b == ptx::Major::k ? 32 : 64;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Drain drain{shared, consumer, static_cast<int>(threadIdx.x / 32 % 4), lane};
  PipeCursor cursor;
  Tile tile;
  while (reader.next(tile)) {
    reader.release(lane);
    const Problem& problem = args.problems[tile.problem];
    const bool active = tile.m0 + 64 * consumer < problem.m_extent;
    switch (active && tile.num_n > 0 ? ceil_div(tile.num_n, kStep) * kStep : 0) {
#define UNIEP_CASE(n)                                                 \
  case n:                                                             \
    if constexpr (n % kStep == 0) {                                   \
      consume_tile<kConfig, n>(problem, tile, shared, cursor, drain); \
    }                                                                 \
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
  if (drain.is_leader()) ptx::tma_wait_written();
}

}  // namespace uniep::cuda
