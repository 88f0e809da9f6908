// SPDX-License-Identifier: Apache-2.0
// Stores of a warpgroup's accumulator by the warps themselves: through shared memory, where lanes
// trade their elements for 16 consecutive bytes, to whole lines of global memory. A copy by TMA
// would queue behind the loads of the next tile, and its issuing warp with it.
#pragma once

#include <cstdint>

#include "cuda/formulas.cuh"
#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/cluster.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda/ptx/stmatrix.hpp"
#include "cuda/roles/gemm_multiply.cuh"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

// Address of 16-byte chunk `chunk` of row `row` in a buffer with rows of 128 or 64 bytes, swizzled
// as the tensor map of a copy says.
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

// Accumulator groups j and j + 1, as the four matrices of an stmatrix.
__device__ __forceinline__ void pack_groups(const Accumulator& acc, int j,
                                            std::uint32_t (&packed)[4]) {
  UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
    packed[i] = pack_bf16(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
  }
}

// A lane's place when its warp stores 16 rows of 128 bytes of a staging buffer: chunk lane % 8 of
// rows 16 warp + lane / 8 + 4 i.
struct StoreLanes {
  SharedStorage& shared;
  int consumer;
  int warp;  // 0 to 3
  int lane;

  [[nodiscard]] __device__ __forceinline__ std::uint32_t buffer(int index) const {
    return ptx::shared_address(shared.staging[consumer][index % kNumStagingBuffers]);
  }
  [[nodiscard]] __device__ __forceinline__ int row(int i) const {
    return 16 * warp + lane / 8 + 4 * i;
  }
  [[nodiscard]] __device__ __forceinline__ int chunk() const { return lane % 8; }
  __device__ __forceinline__ void sync_warpgroup() const {
    ptx::named_barrier_sync(1 + consumer, 128);
  }
};

// Blocks of [64 token rows, 64 m] bf16: the accumulator is transposed on its way to shared memory,
// so that every warp has a share of every row. Two blocks are staged between barriers.
template <int kN>
__device__ __forceinline__ void store_rows_bf16(const Problem& problem, const Tile& tile,
                                                Accumulator& acc, const StoreLanes& at) {
  constexpr int kBlocks = (kN + 63) / 64;
  const int matrix = at.lane / 8;
  const std::uint32_t offset =
      swizzle128(0, 8 * (matrix / 2) + at.lane % 8, 2 * at.warp + matrix % 2);
  const int m = tile.m0 + 64 * at.consumer + 8 * at.chunk();
  auto* const out =
      static_cast<uint4*>(problem.out) +
      (static_cast<std::int64_t>(tile.row_start + tile.n0 + at.row(0)) * problem.m_extent + m) / 8;
  const std::int64_t row_pitch = problem.m_extent / 8;
  UNIEP_UNROLL for (int first = 0; first < kBlocks; first += kNumStagingBuffers) {
    const int last = first + kNumStagingBuffers < kBlocks ? first + kNumStagingBuffers : kBlocks;
    if (first != 0) at.sync_warpgroup();
    UNIEP_UNROLL for (int block = first; block < last; ++block) {
      zero_padding<kN>(acc, block, tile.num_n, at.lane);
      UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 2) {
        std::uint32_t packed[4];
        pack_groups(acc, 8 * block + jj, packed);
        ptx::stmatrix_x4_trans(at.buffer(block) + offset + jj * 8 * 128, packed);
      }
    }
    at.sync_warpgroup();
    UNIEP_UNROLL for (int block = first; block < last; ++block) {
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const uint4 value =
            ptx::load_shared_16(swizzle128(at.buffer(block), at.row(i), at.chunk()));
        if (m < problem.m_extent) out[(64 * block + 4 * i) * row_pitch] = value;
      }
    }
  }
  at.sync_warpgroup();  // the buffers are free for the next tile
}

// Blocks of [64 token rows, 64 m] fp32: 32 m in each of the two buffers.
template <int kN>
__device__ __forceinline__ void store_rows_f32(const Problem& problem, const Tile& tile,
                                               Accumulator& acc, const StoreLanes& at) {
  static_assert(kNumStagingBuffers == 2);
  const int m = tile.m0 + 64 * at.consumer + 4 * at.chunk();
  auto* const out =
      static_cast<uint4*>(problem.out) +
      (static_cast<std::int64_t>(tile.row_start + tile.n0 + at.row(0)) * problem.m_extent + m) / 4;
  const std::int64_t row_pitch = problem.m_extent / 4;
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    zero_padding<kN>(acc, block, tile.num_n, at.lane);
    if (block != 0) at.sync_warpgroup();
    UNIEP_UNROLL for (int jj = 0; jj < 8; ++jj) {
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const int row = 8 * jj + 2 * (at.lane % 4) + i % 2;
        const int column = 16 * (at.warp % 2) + at.lane / 4 + 8 * (i / 2);
        ptx::store_shared(swizzle128(at.buffer(at.warp / 2), row, column / 4) + column % 4 * 4,
                          acc[4 * (8 * block + jj) + i]);
      }
    }
    at.sync_warpgroup();
    UNIEP_UNROLL for (int half = 0; half < 2; ++half) {
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const uint4 value = ptx::load_shared_16(swizzle128(at.buffer(half), at.row(i), at.chunk()));
        if (m + 32 * half < problem.m_extent) {
          out[(64 * block + 4 * i) * row_pitch + 8 * half] = value;
        }
      }
    }
  }
  at.sync_warpgroup();  // the buffers are free for the next tile
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

// Blocks of [64 token rows, 32 columns of a] and, if asked for, of gate and up of h: half a buffer
// each, in lines of 64 bytes.
template <int kN>
__device__ __forceinline__ void store_swiglu(const Problem& problem, const Tile& tile,
                                             Accumulator& acc, const RowWeights& weights,
                                             const StoreLanes& at) {
  static_assert(kNumStagingBuffers == 2);
  const std::uint32_t gates = at.buffer(0), ups = gates + ptx::kBoxBytes / 2, as = at.buffer(1);
  const int ffn = problem.m_extent / 2;
  const int thread_row = 8 * at.warp + at.lane / 4;  // and 32 further
  const int chunk = at.lane % 4;
  const int column = tile.m0 / 2 + 32 * at.consumer + 8 * chunk;
  const std::int64_t first_row = tile.row_start + tile.n0 + thread_row;
  auto* const a_out = static_cast<uint4*>(problem.out) + (first_row * ffn + column) / 8;
  auto* const h_out = static_cast<uint4*>(problem.h) + (first_row * 2 * ffn + column) / 8;
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    zero_padding<kN>(acc, block, tile.num_n, at.lane);
    if (block != 0) at.sync_warpgroup();
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 4) {
      std::uint32_t gate[4], up[4], a[4];
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
        const int j = 8 * block + jj + i;
        gate[i] = pack_bf16(acc[4 * j], acc[4 * j + 1]);
        up[i] = pack_bf16(acc[4 * j + 2], acc[4 * j + 3]);
        const float2 weight = weights.get(block, jj + i, at.lane);
        a[i] = pack_bf16(activation(first_of(gate[i]), first_of(up[i]), weight.x),
                         activation(second_of(gate[i]), second_of(up[i]), weight.y));
      }
      const std::uint32_t offset = swizzle64(0, 8 * jj + at.lane, at.warp);
      ptx::stmatrix_x4_trans(gates + offset, gate);
      ptx::stmatrix_x4_trans(ups + offset, up);
      ptx::stmatrix_x4_trans(as + offset, a);
    }
    at.sync_warpgroup();
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
  at.sync_warpgroup();  // the buffers are free for the next tile
}

// Blocks of [64 m, 64 n] bf16, each warp its own 16 m.
template <int kN>
__device__ __forceinline__ void store_grad_bf16(const Problem& problem, const Tile& tile,
                                                Accumulator& acc, const StoreLanes& at) {
  const int matrix = at.lane / 8;
  const std::uint32_t offset =
      swizzle128(0, 16 * at.warp + 8 * (matrix % 2) + at.lane % 8, matrix / 2);
  const int m = tile.m0 + 64 * at.consumer + at.row(0);
  auto* const out =
      static_cast<uint4*>(problem.out) +
      ((static_cast<std::int64_t>(tile.expert) * problem.m_extent + m) * problem.n_extent +
       tile.n0) /
          8 +
      at.chunk();
  const std::int64_t row_pitch = problem.n_extent / 8;
  UNIEP_UNROLL for (int block = 0; block < kN / 64; ++block) {
    const std::uint32_t buffer = at.buffer(block);
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 2) {
      std::uint32_t packed[4];
      pack_groups(acc, 8 * block + jj, packed);
      // Two chunks further, which the swizzle makes an exclusive or.
      ptx::stmatrix_x4((buffer + offset) ^ (jj * 16), packed);
    }
    __syncwarp();
    const bool in_columns = 64 * block + 8 * at.chunk() < tile.num_n;
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      const uint4 value = ptx::load_shared_16(swizzle128(buffer, at.row(i), at.chunk()));
      if (in_columns && m + 4 * i < problem.m_extent) out[4 * i * row_pitch + 8 * block] = value;
    }
    __syncwarp();
  }
}

// Blocks of [64 m, 32 n] fp32, each warp its own 16 m, stored or added: an element has one owner,
// so the addition is an ordinary one, rounded once. What is added to is loaded kAhead blocks early.
template <int kN>
__device__ __forceinline__ void store_grad_f32(const Problem& problem, const Tile& tile,
                                               Accumulator& acc, const StoreLanes& at) {
  constexpr int kBlocks = kN / 32;
  constexpr int kAhead = kBlocks < 2 ? kBlocks : 2;
  const bool add = problem.add != 0;
  if (add && tile.num_k_tiles == 0) return;  // + 0 would turn -0 into +0
  const int m = tile.m0 + 64 * at.consumer + at.row(0);
  auto* const out =
      static_cast<float4*>(problem.out) +
      ((static_cast<std::int64_t>(tile.expert) * problem.m_extent + m) * problem.n_extent +
       tile.n0) /
          4 +
      at.chunk();
  const std::int64_t row_pitch = problem.n_extent / 4;
  const auto is_inside = [&](int block, int i) {
    return 32 * block + 4 * at.chunk() < tile.num_n && m + 4 * i < problem.m_extent;
  };
  float4 before[kAhead][4];
  const auto load = [&](int block) {
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      if (is_inside(block, i)) before[block % kAhead][i] = out[4 * i * row_pitch + 8 * block];
    }
  };
  if (add) {
    UNIEP_UNROLL for (int block = 0; block < kAhead; ++block) load(block);
  }
  UNIEP_UNROLL for (int block = 0; block < kBlocks; ++block) {
    const std::uint32_t buffer = at.buffer(block);
    UNIEP_UNROLL for (int jj = 0; jj < 4; ++jj) {
      UNIEP_UNROLL for (int i = 0; i < 4; i += 2) {
        const int j = 4 * block + jj;
        const int row = 16 * at.warp + at.lane / 4 + 4 * i;
        const int n = 8 * jj + 2 * (at.lane % 4);
        ptx::store_shared(swizzle128(buffer, row, n / 4) + n % 4 * 4, acc[4 * j + i],
                          acc[4 * j + i + 1]);
      }
    }
    __syncwarp();
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      const uint4 bits = ptx::load_shared_16(swizzle128(buffer, at.row(i), at.chunk()));
      float4 value{__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                   __uint_as_float(bits.w)};
      if (add) {
        const float4& old = before[block % kAhead][i];
        value = {__fadd_rn(old.x, value.x), __fadd_rn(old.y, value.y), __fadd_rn(old.z, value.z),
                 __fadd_rn(old.w, value.w)};
      }
      if (is_inside(block, i)) out[4 * i * row_pitch + 8 * block] = value;
    }
    if (add && block + kAhead < kBlocks) load(block + kAhead);
    __syncwarp();
  }
}

}  // namespace uniep::cuda
