// SPDX-License-Identifier: Apache-2.0
// The one iterator over tiles that every role asks. A cluster of two blocks takes cluster tiles
// cluster, cluster + num_clusters, ... of the concatenation of all groups; a group is (problem,
// expert). In a cluster tile the two blocks either take two m tiles of one n tile (and share B),
// or, for the last m tile of an odd number, two n tiles (and share A).
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

template <KernelConfig kConfig>
struct TileWalk {
  const KernelArgs& args;
  const std::uint32_t* group_ends;  // [num_groups] in shared memory: running count of cluster tiles
  std::uint32_t tile;
  std::uint32_t num_clusters;
  int block_rank;
  int group = 0;

  __device__ __forceinline__ bool next(Tile& out) {
    const int num_groups = args.num_problems * args.num_experts;
    while (group < num_groups && tile >= group_ends[group]) ++group;
    if (group == num_groups) return false;
    decode(static_cast<int>(tile - (group == 0 ? 0 : group_ends[group - 1])), out);
    tile += num_clusters;
    return true;
  }

  __device__ __forceinline__ void decode(int local, Tile& out) const {
    out.problem = group / args.num_experts;
    out.expert = group - out.problem * args.num_experts;
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
    out.n0 = n_tile * kTileN;
    out.num_n = min(kTileN, n_extent - out.n0);
    out.num_k_tiles = ceil_div(kConfig.rows_on_n() ? problem.k_extent : rows, kTileK);
  }
};

// Cluster tiles of one group.
template <KernelConfig kConfig>
__device__ __forceinline__ std::uint32_t count_cluster_tiles(const KernelArgs& args, int group) {
  const Problem& problem = args.problems[group / args.num_experts];
  const int rows = static_cast<int>(args.expert_rows[group % args.num_experts]);
  const int m_tiles = ceil_div(problem.m_extent, kTileM);
  const int n_tiles = ceil_div(kConfig.rows_on_n() ? rows : problem.n_extent, kTileN);
  return m_tiles / 2 * n_tiles + m_tiles % 2 * ceil_div(n_tiles, 2);
}

// Fills group_ends; every thread of the block calls it, and the block must synchronise after.
template <KernelConfig kConfig>
__device__ __forceinline__ void count_groups(const KernelArgs& args, std::uint32_t* group_ends) {
  const int num_groups = args.num_problems * args.num_experts;
  for (int group = threadIdx.x; group < num_groups; group += blockDim.x) {
    group_ends[group] = count_cluster_tiles<kConfig>(args, group);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  std::uint32_t total = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int group = first + static_cast<int>(threadIdx.x);
    std::uint32_t sum = group < num_groups ? group_ends[group] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t below = __shfl_up_sync(0xFFFFFFFFU, sum, step);
      if (static_cast<int>(threadIdx.x) >= step) sum += below;
    }
    if (group < num_groups) group_ends[group] = total + sum;
    total += __shfl_sync(0xFFFFFFFFU, sum, 31);
  }
}

}  // namespace uniep::cuda
