// SPDX-License-Identifier: Apache-2.0
// The epilogue role: from a warpgroup's accumulator through a small ring of boxes to global
// memory, by TMA but for SwiGLU. Token rows are
// stored in blocks of 64, which start where the 64-row alignment of experts says: rows past the
// expert's last are stored as zeros up to the next multiple of 64, and nothing beyond is touched.
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
#include "cuda/sched/tickets.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

// A warpgroup's view of itself and of its ring of boxes. A tile that fits in the ring fills it in
// one go: open(), fill, copy(). One that does not goes box by box: acquire(),
// fill, publish(), and the leader copies.
struct Drain {
  SharedStorage& shared;
  int consumer;
  int warp;  // 0 to 3
  int lane;
  HeldStages held;
  int box = 0;        // the next one in the ring
  int num_taken = 0;  // of this tile

  [[nodiscard]] __device__ __forceinline__ bool is_leader() const { return warp == 0 && lane == 0; }
  __device__ __forceinline__ void sync() const { ptx::named_barrier_sync(1 + consumer, 128); }
  [[nodiscard]] __device__ __forceinline__ int num_boxes() const {
    return kNumStagingBuffers + held.count;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t address(int index) const {
    if (index < held.count) {
      return ptx::shared_address(shared.stages[(held.first + index) % kNumPipeStages].a[consumer]);
    }
    return ptx::shared_address(shared.staging[consumer][index - held.count]);
  }

  __device__ __forceinline__ void begin_tile() { box = num_taken = 0; }

  // All boxes are free, and all warps are done with the products that read them.
  __device__ __forceinline__ void open() {
    if (is_leader()) ptx::tma_wait_read<0>();
    sync();
  }
  // The leader calls store(i, box) for the first `count` boxes, which copies from them.
  template <typename Store>
  __device__ __forceinline__ void copy(int count, Store&& store) {
    ptx::fence_proxy_async_shared();
    sync();
    if (is_leader()) {
      UNIEP_NO_UNROLL for (int i = 0; i < count; ++i) {
        store(i, address(i));
        ptx::tma_commit();
      }
    }
    held.staged_last = count == num_boxes();
  }

  // The next box, once the copies that last read it are done. Only the leader issues copies.
  __device__ __forceinline__ std::uint32_t acquire() {
    if (num_taken >= num_boxes()) {
      if (is_leader()) {
        if (held.count == kMaxHeldStages) {
          ptx::tma_wait_read<kNumStagingBuffers + kMaxHeldStages - 1>();
        } else {
          ptx::tma_wait_read<kNumStagingBuffers - 1>();
        }
      }
      sync();
    } else if (num_taken == 0) {
      if (is_leader()) ptx::tma_wait_read<0>();
      sync();  // with the leader's wait, and with the products of all warps that read the box
    }
    ++num_taken;
    return address(box);
  }

  // After this the leader may copy from the box that acquire() gave, and must tma_commit() once.
  __device__ __forceinline__ void publish() {
    ptx::fence_proxy_async_shared();
    sync();
    box = box + 1 == num_boxes() ? 0 : box + 1;
    held.staged_last = box == 0;
  }
};

// The blocks of 64 n of a tile through the ring, at once where they fit: fill(block, box) writes a
// block, store(block, box) copies it. Every barrier, fence and instruction less is time in which
// this warpgroup multiplies. A tile of width kN has all of its blocks: num_n > kN - 32 or kN - 64.
template <int kN, typename Fill, typename Store>
__device__ __forceinline__ void drain_blocks(Drain& drain, Fill&& fill, Store&& store) {
  constexpr int kBlocks = (kN + 63) / 64;
  if (drain.num_boxes() >= kBlocks) {
    drain.open();
    UNIEP_UNROLL for (int block = 0; block < kBlocks; ++block) fill(block, drain.address(block));
    drain.copy(kBlocks, store);
  } else {  // a tile of a single stage
    UNIEP_UNROLL for (int block = 0; block < kBlocks; ++block) {
      drain.open();
      fill(block, drain.address(0));
      drain.copy(1, [&](int, std::uint32_t box) { store(block, box); });
    }
  }
}

// Address of 16-byte chunk `chunk` of row `row` in a buffer with rows of 128 or 64 bytes, swizzled
// as the tensor map of the copy says.
__device__ __forceinline__ std::uint32_t swizzle128(std::uint32_t buffer, int row, int chunk) {
  return buffer + row * 128 + ((chunk ^ (row & 7)) << 4);
}
__device__ __forceinline__ std::uint32_t swizzle64(std::uint32_t buffer, int row, int chunk) {
  return buffer + row * 64 + ((chunk ^ ((row >> 1) & 3)) << 4);
}

// Zeroes what lies past the expert's last row in a block of 64 token rows, where anything does.
template <int kN>
__device__ __forceinline__ void zero_padding(Accumulator& acc, int block, int num_n, int lane) {
  if (64 * block + 64 <= kN && 64 * block + 64 <= num_n) return;
  UNIEP_UNROLL for (int j = 8 * block; j < 8 * block + 8; ++j) {
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      if (8 * j >= kN || 8 * j + 2 * (lane % 4) + i % 2 >= num_n) acc[4 * j + i] = 0.0F;
    }
  }
}

// Accumulator group j and the next, as the four matrices of an stmatrix.
__device__ __forceinline__ void pack_pair(const Accumulator& acc, int j,
                                          std::uint32_t (&packed)[4]) {
  UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
    packed[i] = pack_bf16(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
  }
}

// Blocks of [64 token rows, 64 m] bf16: the accumulator is transposed on its way to shared memory.
template <int kN>
__device__ __forceinline__ void store_rows_bf16(const Problem& problem, const Tile& tile,
                                                Accumulator& acc, Drain& drain) {
  // Of the lane's row in the first pair of groups; the next pairs are 16 rows further each.
  const int matrix = drain.lane / 8;
  const std::uint32_t offset =
      swizzle128(0, 8 * (matrix / 2) + drain.lane % 8, 2 * drain.warp + matrix % 2);
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    zero_padding<kN>(acc, block, tile.num_n, drain.lane);
    const std::uint32_t box = drain.acquire();
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 2) {
      std::uint32_t packed[4];
      pack_pair(acc, 8 * block + jj, packed);
      ptx::stmatrix_x4_trans(box + offset + jj * 8 * 128, packed);
    }
    drain.publish();
    if (drain.is_leader()) {
      ptx::tma_store_3d(&problem.d, box, tile.m0 + 64 * drain.consumer,
                        tile.row_start + tile.n0 + 64 * block, 0);
      ptx::tma_commit();
    }
  }
}

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

  template <bool kRowsArrive>
  __device__ __forceinline__ void load(const float* weights, const Tile& tile, int lane) {
    const float* first = weights + tile.row_start + tile.n0;
    const auto get = [&](int n) {
      if (n >= tile.num_n) return 0.0F;
      return kRowsArrive ? __ldcg(first + n) : first[n];
    };
    UNIEP_UNROLL for (int block = 0; block < kTileN / 64; ++block) {
      const int n = 64 * block + 2 * lane;
      pairs[block] = {get(n), get(n + 1)};
    }
  }

  // The weights of this lane's two columns of accumulator group jj of a block.
  __device__ __forceinline__ float2 get(int block, int jj, int lane) const {
    const int source = 4 * jj + lane % 4;
    return {__shfl_sync(0xFFFFFFFFU, pairs[block].x, source),
            __shfl_sync(0xFFFFFFFFU, pairs[block].y, source)};
  }
};

// Blocks of [64 token rows, 32 columns of a] and, if asked for, of gate and up of h: half a buffer
// each, in lines of 64 bytes, which the warps store themselves: for so small boxes that is faster
// than copies by TMA.
template <int kN>
__device__ __forceinline__ void store_swiglu(const Problem& problem, const Tile& tile,
                                             Accumulator& acc, const RowWeights& weights,
                                             Drain& drain) {
  static_assert(kNumStagingBuffers == 2);
  const std::uint32_t gates = drain.address(0), ups = gates + ptx::kBoxBytes / 2,
                      as = drain.address(1);
  const int ffn = problem.m_extent / 2;
  const int thread_row = 8 * drain.warp + drain.lane / 4;  // and 32 further
  const int chunk = drain.lane % 4;
  const int column = tile.m0 / 2 + 32 * drain.consumer + 8 * chunk;
  const std::int64_t first_row = tile.row_start + tile.n0 + thread_row;
  auto* const a_out = static_cast<uint4*>(problem.out) + (first_row * ffn + column) / 8;
  auto* const h_out = static_cast<uint4*>(problem.h) + (first_row * 2 * ffn + column) / 8;
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    zero_padding<kN>(acc, block, tile.num_n, drain.lane);
    if (block != 0) drain.sync();
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 4) {
      std::uint32_t gate[4], up[4], a[4];
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const int j = 8 * block + jj + i;
        gate[i] = pack_bf16(acc[4 * j], acc[4 * j + 1]);
        up[i] = pack_bf16(acc[4 * j + 2], acc[4 * j + 3]);
        const float2 weight = weights.get(block, jj + i, drain.lane);
        a[i] = pack_bf16(activation<StoredBf16>(first_of(gate[i]), first_of(up[i]), weight.x),
                         activation<StoredBf16>(second_of(gate[i]), second_of(up[i]), weight.y));
      }
      const std::uint32_t offset = swizzle64(0, 8 * jj + drain.lane, drain.warp);
      ptx::stmatrix_x4_trans(gates + offset, gate);
      ptx::stmatrix_x4_trans(ups + offset, up);
      ptx::stmatrix_x4_trans(as + offset, a);
    }
    drain.sync();
    UNIEP_UNROLL for (int i = 0; i < 2; ++i) {
      const std::uint32_t offset = swizzle64(0, thread_row + 32 * i, chunk);
      const std::int64_t row = 64 * block + 32 * i;
      const uint4 a = ptx::load_shared_16(as + offset);
      if (column < ffn) a_out[row * ffn / 8] = a;
      if (problem.h != nullptr) {
        const uint4 gate = ptx::load_shared_16(gates + offset);
        const uint4 up = ptx::load_shared_16(ups + offset);
        if (column < ffn) {
          h_out[row * ffn / 4] = gate;
          h_out[row * ffn / 4 + ffn / 8] = up;
        }
      }
    }
  }
  drain.sync();  // the buffers are free for the next tile
}

// Blocks of [64 m, 64 n] bf16.
template <int kN>
__device__ __forceinline__ void store_grad_bf16(const Problem& problem, const Tile& tile,
                                                Accumulator& acc, Drain& drain) {
  // Of lane's row in the first pair of groups; the next pairs are two chunks further each, which
  // the swizzle makes an exclusive or.
  const int matrix = drain.lane / 8;
  const std::uint32_t offset =
      swizzle128(0, 16 * drain.warp + 8 * (matrix % 2) + drain.lane % 8, matrix / 2);
  const int m = tile.m0 + 64 * drain.consumer;
  drain_blocks<kN>(
      drain,
      [&](int block, std::uint32_t box) {
        UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 2) {
          std::uint32_t packed[4];
          pack_pair(acc, 8 * block + jj, packed);
          ptx::stmatrix_x4((box + offset) ^ (jj * 16), packed);
        }
      },
      [&](int block, std::uint32_t box) {
        ptx::tma_store_3d(&problem.d, box, tile.n0 + 64 * block, m, tile.expert);
      });
}

// Blocks of [64 m, 32 n] fp32, stored, or added once: each element of d receives one addition in a
// launch, so there is no order to depend on.
template <int kN>
__device__ __forceinline__ void store_grad_f32(const Problem& problem, const Tile& tile,
                                               Accumulator& acc, Drain& drain) {
  if (problem.add != 0 && tile.num_k_tiles == 0) return;  // + 0 would turn -0 into +0
  UNIEP_UNROLL for (int block = 0; block < kN / 32; ++block) {
    if (32 * block >= tile.num_n) continue;
    const std::uint32_t buffer = drain.acquire();
    UNIEP_UNROLL for (int jj = 0; jj < 4; ++jj) {
      UNIEP_UNROLL for (int i = 0; i < 4; i += 2) {
        const int j = 4 * block + jj;
        const int row = 16 * drain.warp + drain.lane / 4 + 4 * i;
        const int n = 8 * jj + 2 * (drain.lane % 4);
        ptx::store_shared(swizzle128(buffer, row, n / 4) + n % 4 * 4, acc[4 * j + i],
                          acc[4 * j + i + 1]);
      }
    }
    drain.publish();
    if (drain.is_leader()) {
      const int n = tile.n0 + 32 * block;
      const int m = tile.m0 + 64 * drain.consumer;
      if (problem.add != 0) {
        ptx::tma_reduce_add_3d(&problem.d, buffer, n, m, tile.expert);
      } else {
        ptx::tma_store_3d(&problem.d, buffer, n, m, tile.expert);
      }
      ptx::tma_commit();
    }
  }
}

// What an epilogue knows besides the table. Here: the rows were there before the launch.
struct RowsThere {
  static constexpr bool kRowsArrive = false;
};
// Rows and their weights arrive during the launch, and the loader waits for them.
struct RowsArriving {
  static constexpr bool kRowsArrive = true;
};

// One tile of kN values of n, from the first k to the last store. Each width has its own code from
// end to end: the accumulators of different widths then never have to meet in the same registers.
template <KernelConfig kConfig, int kN, typename Context>
__device__ __forceinline__ void consume_tile(const Problem& problem, const Tile& tile,
                                             SharedStorage& shared, PipeCursor& cursor,
                                             Drain& drain, const Context& context) {
  Accumulator acc;
  if constexpr (kConfig.epilogue == Epilogue::rows_home) {
    const auto homes = context.homes_of(tile, drain.warp, drain.lane);
    multiply_tile<kConfig, kN>(shared, acc, cursor, drain.held, tile.num_k_tiles, drain.consumer,
                               drain.warp, drain.lane);
    context.template store<kN>(problem, tile, acc, homes, drain);
    return;
  }
  RowWeights weights;
  if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    if constexpr (Context::kRowsArrive) {
      // Before the loader has begun with the tile its weights may be missing.
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[cursor.stage]), cursor.parity);
    }
    weights.load<Context::kRowsArrive>(problem.row_weights, tile, drain.lane);
  }
  multiply_tile<kConfig, kN>(shared, acc, cursor, drain.held, tile.num_k_tiles, drain.consumer,
                             drain.warp, drain.lane);
  drain.begin_tile();
  if constexpr (kConfig.epilogue == Epilogue::rows_bf16) {
    store_rows_bf16<kN>(problem, tile, acc, drain);
  } else if constexpr (kConfig.epilogue == Epilogue::rows_f32) {
    store_rows_f32<kN>(problem, tile, acc, drain);
  } else if constexpr (kConfig.epilogue == Epilogue::rows_swiglu) {
    store_swiglu<kN>(problem, tile, acc, weights, drain);
  } else if constexpr (kConfig.epilogue == Epilogue::grad_bf16) {
    store_grad_bf16<kN>(problem, tile, acc, drain);
  } else {
    store_grad_f32<kN>(problem, tile, acc, drain);
  }
}

// The consumer warpgroup: multiply, drain, next tile. Token rows come in widths of 32; where n lies
// along a swizzled row, in whole boxes. Gives the number of tiles.
template <KernelConfig kConfig, typename Context>
__device__ __forceinline__ std::uint32_t consume_role(const KernelArgs& args, SharedStorage& shared,
                                                      TileReader<kConfig> reader, int consumer,
                                                      const Context& context) {
  constexpr int kStep = kConfig.b == ptx::Major::k ? 32 : 64;
  const int lane = static_cast<int>(threadIdx.x % 32);
  Drain drain{shared, consumer, static_cast<int>(threadIdx.x / 32 % 4), lane, {}};
  PipeCursor cursor;
  Tile tile;
  while (reader.next(tile)) {
    reader.release(lane);
    const Problem& problem = args.problems[tile.problem];
    const bool active = tile.m0 + 64 * consumer < problem.m_extent;
    switch (active && tile.num_n > 0 ? ceil_div(tile.num_n, kStep) * kStep : 0) {
#define UNIEP_CASE(n)                                                          \
  case n:                                                                      \
    if constexpr (n % kStep == 0) {                                            \
      consume_tile<kConfig, n>(problem, tile, shared, cursor, drain, context); \
    }                                                                          \
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
        drain.held.give_back(shared, drain.is_leader());
        skip_tile(shared, cursor, tile.num_k_tiles, lane);
    }
  }
  if (drain.is_leader()) ptx::tma_wait_written();
  return reader.cursor.count;
}

}  // namespace uniep::cuda
