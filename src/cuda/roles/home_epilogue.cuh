// SPDX-License-Identifier: Apache-2.0
// The epilogue that sends results home: each row of a tile goes from shared memory straight to the
// staging place of its token's rank, or among the own rank's result rows, where combine reads it.
#pragma once

#include "cuda/kernels/shared_storage.cuh"
#include "cuda/roles/combine_roles.cuh"
#include "cuda/roles/gemm_epilogue.cuh"

namespace uniep::cuda {

// Where a rank's rows go.
struct HomePlaces {
  const MoveShape& shape;
  const RowSource* row_sources;
  std::byte* y_rows;  // of the own rank
  int rank;

  [[nodiscard]] __device__ __forceinline__ std::byte* find(std::int64_t row) const {
    const RowSource source = row_sources[row];
    if (source.rank < 0) return nullptr;
    if (source.rank == rank) return y_rows + row * shape.row_bytes;
    return shape.group.parts[source.rank] + shape.regions.staging +
           std::int64_t{source.place} * shape.row_bytes;
  }
};

// The homes of the 64 rows of a tile that a warp stores: of every block of 64 rows and every 16 of
// them four, from 4 * warp on. Lane l knows numbers l and l + 32 of them, counted in that order.
// Loaded before the products, so that nobody waits for them afterwards.
struct RowHomes {
  std::byte* low;
  std::byte* high;

  __device__ __forceinline__ void load(const HomePlaces& homes, const Tile& tile, int warp,
                                       int lane) {
    const auto find = [&](int number) -> std::byte* {
      const int n = 64 * (number / 16) + 16 * (number / 4 % 4) + 4 * warp + number % 4;
      return n < tile.num_n ? homes.find(std::int64_t{tile.row_start} + tile.n0 + n) : nullptr;
    };
    low = find(lane);
    high = find(lane + 32);
  }

  // Of row lane / 8 of the four in a block and a 16 of it.
  [[nodiscard]] __device__ __forceinline__ std::byte* get(int block, int sixteen, int lane) const {
    return shuffle(block < 2 ? low : high, (16 * block + 4 * sixteen + lane / 8) % 32);
  }
};

// Blocks of [64 token rows, 64 m] bf16, 128 bytes a row, through the two boxes in turn: a box is
// written again only after the barrier of the block between.
template <int kN>
__device__ __forceinline__ void store_rows_home(const Problem& problem, const Tile& tile,
                                                Accumulator& acc, const RowHomes& homes,
                                                Drain& drain) {
  static_assert(kNumStagingBuffers == 2);
  const int matrix = drain.lane / 8;
  const std::uint32_t fill_offset =
      swizzle128(0, 8 * (matrix / 2) + drain.lane % 8, 2 * drain.warp + matrix % 2);
  const int chunk = drain.lane % 8;
  const int column = tile.m0 + 64 * drain.consumer + 8 * chunk;
  UNIEP_UNROLL for (int block = 0; block < (kN + 63) / 64; ++block) {
    const std::uint32_t box = ptx::shared_address(drain.shared.staging[drain.consumer][drain.box]);
    drain.box ^= 1;
    UNIEP_UNROLL for (int jj = 0; jj < 8; jj += 2) {
      if (64 * block + 8 * jj >= kN) continue;
      std::uint32_t packed[4];
      pack_pair(acc, 8 * block + jj, packed);
      ptx::stmatrix_x4_trans(box + fill_offset + jj * 8 * 128, packed);
    }
    drain.sync();
    UNIEP_UNROLL for (int sixteen = 0; sixteen < 4; ++sixteen) {
      std::byte* const home = homes.get(block, sixteen, drain.lane);
      const int row = 16 * sixteen + 4 * drain.warp + drain.lane / 8;
      const uint4 piece = ptx::load_shared_16(swizzle128(box, row, chunk));
      if (home != nullptr && column < problem.m_extent) {
        *reinterpret_cast<uint4*>(home + 2 * std::int64_t{column}) = piece;
      }
    }
  }
}

// What consume_role asks.
struct RowsHome {
  static constexpr bool kRowsArrive = false;
  HomePlaces places;

  [[nodiscard]] __device__ __forceinline__ RowHomes homes_of(const Tile& tile, int warp,
                                                             int lane) const {
    RowHomes homes;
    homes.load(places, tile, warp, lane);
    return homes;
  }
  template <int kN>
  __device__ __forceinline__ void store(const Problem& problem, const Tile& tile, Accumulator& acc,
                                        const RowHomes& homes, Drain& drain) const {
    store_rows_home<kN>(problem, tile, acc, homes, drain);
  }
};

}  // namespace uniep::cuda
