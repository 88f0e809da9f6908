// SPDX-License-Identifier: Apache-2.0
// From a ticket to a tile: what every role asks. Tickets count cluster tiles of the concatenation
// of all groups; a group is (problem, expert). In a cluster tile the two blocks either take two m
// tiles of one n tile (and share B), or, for the last m tile of an odd number, two n tiles (and
// share A). Weight gradients take the experts by falling rows, since a tile costs what its expert
// has rows: the last tiles drawn are then the shortest.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"

namespace uniep::cuda {

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Tile {
  int problem;
  int expert;
  int row_start;  // the expert's first row in the buffer
  int m0;         // first m of this block's tile
  int n0;         // first n, within the expert where n counts rows
  int num_n;      // valid n; at most 0 if the block's half of the cluster tile is empty
  int num_k_tiles;
  bool shares_b;
};

// Cluster tiles of one group whose expert has `rows` rows.
template <KernelConfig kConfig>
__device__ __forceinline__ std::uint32_t count_cluster_tiles(const Problem& problem, int rows) {
  const int m_tiles = ceil_div(problem.m_extent, kTileM);
  const int n_tiles = ceil_div(kConfig.rows_on_n() ? rows : problem.n_extent, kTileN);
  return m_tiles / 2 * n_tiles + m_tiles % 2 * ceil_div(n_tiles, 2);
}

// Where n tile `tile` of `n_tiles` begins: tiles are multiples of 64 as equal as they can be, since
// a narrow tile asks for as much of A as a full one and would have to wait for it.
__device__ __forceinline__ int first_n(int tile, int n_tiles, int n_extent) {
  const int blocks = ceil_div(n_extent, 64);
  const int narrow = blocks / n_tiles;
  return 64 * (tile * narrow + min(tile, blocks - narrow * n_tiles));
}

template <KernelConfig kConfig>
struct TileWalk {
  const KernelArgs& args;
  const std::uint32_t* groups;  // see SharedStorage
  int block_rank;
  int group = 0;  // of the ticket before

  // The tile of a ticket, false past the last. A role's tickets must ascend.
  __device__ __forceinline__ bool find(std::uint32_t ticket, Tile& out) {
    if constexpr (kConfig.rows_on_n()) {
      const int num_groups = args.num_problems * args.num_experts;
      while (group < num_groups && ticket >= groups[group]) ++group;
      if (group == num_groups) return false;
      out.problem = group / args.num_experts;
      out.expert = group - out.problem * args.num_experts;
      decode(static_cast<int>(ticket - (group == 0 ? 0 : groups[group - 1])), out);
    } else {
      std::uint32_t per_expert = 0;
      for (int p = 0; p < args.num_problems; ++p) {
        per_expert += count_cluster_tiles<kConfig>(args.problems[p], 0);
      }
      const std::uint32_t position = ticket / per_expert;
      if (position >= static_cast<std::uint32_t>(args.num_experts)) return false;
      out.expert = static_cast<int>(groups[position]);
      std::uint32_t local = ticket - position * per_expert;
      for (out.problem = 0;; ++out.problem) {
        const std::uint32_t here = count_cluster_tiles<kConfig>(args.problems[out.problem], 0);
        if (local < here) break;
        local -= here;
      }
      decode(static_cast<int>(local), out);
    }
    return true;
  }

  __device__ __forceinline__ void decode(int local, Tile& out) const {
    const Problem& problem = args.problems[out.problem];
    const int rows = static_cast<int>(args.expert_rows[out.expert]);
    out.row_start = static_cast<int>(args.expert_starts[out.expert]);
    const int n_extent = kConfig.rows_on_n() ? rows : problem.n_extent;
    const int m_tiles = ceil_div(problem.m_extent, kTileM);
    const int n_tiles = ceil_div(n_extent, kTileN);
    const int m_pairs = m_tiles / 2;
    int m_tile = m_tiles - 1;
    int n_tile = 2 * (local - m_pairs * n_tiles) + block_rank;
    out.shares_b = local < m_pairs * n_tiles;
    if (out.shares_b) {
      // Bands of n tiles; within a band all of its n tiles for one pair of m tiles, then the next.
      const int band = local / (problem.band * m_pairs);
      const int in_band = local - band * problem.band * m_pairs;
      const int width = min(problem.band, n_tiles - band * problem.band);
      m_tile = 2 * (in_band / width) + block_rank;
      n_tile = band * problem.band + in_band % width;
    }
    out.m0 = m_tile * kTileM;
    out.n0 = first_n(n_tile, n_tiles, n_extent);
    out.num_n = min(first_n(n_tile + 1, n_tiles, n_extent), n_extent) - out.n0;
    out.num_k_tiles = ceil_div(kConfig.rows_on_n() ? problem.k_extent : rows, kTileK);
  }
};

// Fills the table of groups; every thread of the block calls it, and the block must synchronise
// after.
template <KernelConfig kConfig>
__device__ __forceinline__ void fill_groups(const KernelArgs& args, std::uint32_t* groups) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  if constexpr (!kConfig.rows_on_n()) {
    for (int expert = thread; expert < args.num_experts; expert += num_threads) {
      const std::int64_t rows = args.expert_rows[expert];
      int position = 0;
      for (int other = 0; other < args.num_experts; ++other) {
        const std::int64_t others = args.expert_rows[other];
        position += others > rows || (others == rows && other < expert) ? 1 : 0;
      }
      groups[position] = static_cast<std::uint32_t>(expert);
    }
    return;
  }
  const int num_groups = args.num_problems * args.num_experts;
  for (int group = thread; group < num_groups; group += num_threads) {
    groups[group] =
        count_cluster_tiles<kConfig>(args.problems[group / args.num_experts],
                                     static_cast<int>(args.expert_rows[group % args.num_experts]));
  }
  __syncthreads();
  if (thread >= 32) return;
  std::uint32_t total = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int group = first + thread;
    std::uint32_t sum = group < num_groups ? groups[group] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t below = __shfl_up_sync(0xFFFFFFFFU, sum, step);
      if (thread >= step) sum += below;
    }
    if (group < num_groups) groups[group] = total + sum;
    total += __shfl_sync(0xFFFFFFFFU, sum, 31);
  }
}

// How many tickets have a tile.
template <KernelConfig kConfig>
__device__ __forceinline__ std::uint32_t count_tickets(const KernelArgs& args,
                                                       const std::uint32_t* groups) {
  if constexpr (kConfig.rows_on_n()) {
    return args.num_experts == 0 ? 0 : groups[args.num_problems * args.num_experts - 1];
  }
  std::uint32_t per_expert = 0;
  for (int p = 0; p < args.num_problems; ++p) {
    per_expert += count_cluster_tiles<kConfig>(args.problems[p], 0);
  }
  return per_expert * static_cast<std::uint32_t>(args.num_experts);
}

}  // namespace uniep::cuda
