// SPDX-License-Identifier: Apache-2.0
// What the host passes to the fused kernels of the forward: dispatch with gemm1 and activation, and
// gemm2 with combine. bf16 on tensor cores only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/split_args.hpp"

namespace uniep::cuda {

inline constexpr int kMaxFusedRanks = 8;  // of one launch
inline constexpr int kFusedWarps = 12;    // of a block
inline constexpr int kRowGroup = 64;      // rows that share a word of arrival
inline constexpr int kRowWordShift = 8;
inline constexpr int kCountShift = 20;

// Words of one rank in its GPU's memory, all zeros at first; see roles/arrival.cuh. GPU scope.
struct FusedWords {
  // [max_rows / 64], shift 8: added to by the warps that wrote rows of the group, awaited by the
  // loaders of its tiles; the rows and their weights become visible.
  std::uint64_t* rows;
  std::uint64_t* relays;  // shift 20: chunks that relays have drawn
  // Shift 20: added to by each block when its tiles are finished; whoever completes it raises
  // `returned`.
  std::uint64_t* tiles;
  // Shift 20: blocks that have ended; whoever completes it raises `consumed` and advances the
  // epoch.
  std::uint64_t* blocks;
};

inline constexpr int kFusedCounts = 3;  // words of FusedWords besides rows

// The clusters of a launch: cluster c works for local rank c % num_local_ranks.
struct FusedShape {
  std::int32_t num_local_ranks;
  std::int32_t clusters_per_rank;
  std::int32_t moving_blocks;  // kernel 1: a rank's first blocks move rows before they multiply; even
};

struct FusedDispatchArgs {
  MoveShape shape;
  FusedShape fused;
  const std::int32_t* in_order;     // see PlanArgs
  const std::int32_t* owner_start;  // see PlanArgs
  std::int32_t num_experts;
  DispatchRank ranks[kMaxFusedRanks];  // from shape.first_rank on
  KernelArgs gemm1[kMaxFusedRanks];    // one problem each, or no experts
  FusedWords words[kMaxFusedRanks];
};

struct FusedCombineArgs {
  MoveShape shape;
  FusedShape fused;
  CombineRank ranks[kMaxFusedRanks];
  std::byte* y_rows[kMaxFusedRanks];  // those of ranks, written here
  KernelArgs gemm2[kMaxFusedRanks];
  FusedWords words[kMaxFusedRanks];
};

cudaError_t launch_fused_dispatch(const FusedDispatchArgs& args, cudaStream_t stream);
cudaError_t launch_fused_combine(const FusedCombineArgs& args, cudaStream_t stream);

}  // namespace uniep::cuda
