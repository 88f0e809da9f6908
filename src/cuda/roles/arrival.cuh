// SPDX-License-Identifier: Apache-2.0
// Words that count within an operation and are never cleared: epoch << shift | count. An operation
// that fails leaves in them nothing that the next epoch does not exceed.
#pragma once

#include <cstdint>

#include "cuda/fused_args.hpp"
#include "cuda/ptx/tma.hpp"
#include "cuda/sched/tile_walk.cuh"
#include "cuda/wait.cuh"

namespace uniep::cuda {

// Adds to the word's count in this epoch; gives the count before. Orders nothing: what the count
// stands for needs a fence before, and whoever sees the last count a fence after.
template <int kShift>
__device__ __forceinline__ std::uint64_t count_in_epoch(std::uint64_t* word, std::uint64_t epoch,
                                                        std::uint64_t amount) {
  auto* const shared_word = reinterpret_cast<unsigned long long*>(word);
  const unsigned long long start = epoch << kShift;
  atomicMax(shared_word, start);
  return atomicAdd(shared_word, static_cast<unsigned long long>(amount)) - start;
}

// One row of the 64 with this one is there. The writing warp has fenced.
__device__ __forceinline__ void count_row(const FusedWords& words, std::uint64_t epoch,
                                          std::int64_t row) {
  count_in_epoch<kRowWordShift>(&words.rows[row / kRowGroup], epoch, 1);
}

// Before a loader's first load of a tile whose rows are on their way: waits for all of them. An
// expired or ended wait returns too, as the products must go on.
struct RowWait {
  const GroupView& group;
  const std::uint64_t* words;
  std::uint64_t epoch;
  int rank;

  __device__ __forceinline__ void operator()(const Tile& tile) const {
    const int first_row = tile.row_start + tile.n0;  // a multiple of 64, as n0 is
    for (int n = 0; n < tile.num_n; n += kRowGroup) {
      const int group_of_rows = (first_row + n) / kRowGroup;
      const auto rows = static_cast<std::uint64_t>(min(kRowGroup, tile.num_n - n));
      if (!wait_at_least(group, &words[group_of_rows], (epoch << kRowWordShift) + rows,
                         {rank, WaitStage::gemm1_rows, rank, group_of_rows})) {
        return;
      }
    }
    ptx::fence_proxy_async_global();
  }
};

}  // namespace uniep::cuda
