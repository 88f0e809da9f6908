// SPDX-License-Identifier: Apache-2.0
// What the host passes to the split kernels, and what lies where in the symmetric memory: rows on
// their way, results on their way home, and their signals. Receive regions are indexed by (source
// rank, token) or (source rank, token, choice), staging by (token, choice), so no routing overflows
// them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/plan_args.hpp"
#include "cuda/symmetric_memory.hpp"

namespace uniep::cuda {

inline constexpr int kMoveThreads = 512;
inline constexpr int kMoveWarps = kMoveThreads / 32;

// Offsets from a part's start. A region that the schedule does not use has no bytes.
struct SplitRegions {
  // Signal [num_ranks], by source, and [num_ranks] i64: written by block 0 of the source's
  // dispatch, awaited by the owner's relays; the source's number of tokens becomes visible.
  std::int64_t tokens_ready;
  std::int64_t num_tokens;
  // Signal [num_ranks, max_chunks], by source: written by the warp of the source that sent the
  // chunk, awaited by the owner's relay of it; the chunk's recv_slots, recv_weights and rows
  // (recv_rows, or the source's send_rows) become visible.
  std::int64_t chunk_ready;
  // Signal [num_ranks, kMaxBlocksPerRank], by the rank that returns: written by its block, awaited
  // by all blocks of the owner's combine; the block's rows of staging and d_weight_staging (or, at
  // the returning rank, y_rows and d_weight_rows) become visible.
  std::int64_t returned;
  // Signal [num_ranks, kMaxBlocksPerRank], by the reader: written by the reader's block at the end
  // of its combine, awaited by all blocks of the owner's next dispatch, up to last_combine. The
  // reader will touch none of the operation's regions, its own or the owner's: all may be written.
  std::int64_t consumed;
  // Signal [kMaxBlocksPerRank]: written by the owner's block at its end, awaited by the owner's
  // block 0, which then advances the epoch; that the block has read the old one.
  std::int64_t block_done;
  std::int64_t recv_slots;    // [num_ranks, max_tokens, topk] i32, -1: not for this rank
  std::int64_t recv_weights;  // [num_ranks, max_tokens, topk] f32
  // Fused: [num_ranks, max_tokens, topk] i32, by source: the place whose row comes with an entry of
  // the source's send_order, or -1; as recv_slots.
  std::int64_t recv_places;
  std::int64_t recv_rows;         // push: [num_ranks, max_tokens (, topk), hidden]
  std::int64_t send_rows;         // pull: [max_tokens, hidden]
  std::int64_t staging;           // push: [max_tokens, topk, hidden]
  std::int64_t d_weight_staging;  // push: [max_tokens, topk] f32
  std::int64_t y_rows;            // pull: [max_rows, hidden], expert-major results
  std::int64_t d_weight_rows;     // pull: [max_rows] f32
};

struct MoveShape {
  GroupView group;
  SplitRegions regions;
  std::int64_t row_bytes;
  std::int64_t max_tokens;
  std::int32_t topk;
  std::int32_t chunk;       // tokens that are signalled together
  std::int32_t max_chunks;  // of a rank, for each peer
  std::int32_t first_rank;  // of this launch
  std::int32_t blocks_per_rank;
  std::int32_t element_bytes;  // 2: bf16, 4: f32
  bool per_choice;             // a row per choice, or one per (token, destination rank)
  bool pull_dispatch;          // receivers fetch rows, or sources push them
  bool pull_combine;
  std::int32_t push_warps;  // of a block's kMoveWarps; the others fan out
};

struct DispatchRank {
  PlanArrays plan;
  const std::byte* rows;      // [num_tokens, hidden]
  const float* topk_weights;  // [num_tokens, topk], or nullptr where they do not travel
  std::int64_t num_tokens;
  std::byte* rows_out;   // [padded rows, hidden] expert-major; padding is written with zeros
  float* weights_out;    // [padded rows], or nullptr; padding is not written
  std::int32_t experts;  // local ones
};

struct DispatchArgs {
  MoveShape shape;
  DispatchRank ranks[kMaxDeviceRanks];  // from first_rank on
};

struct CombineRank {
  PlanArrays plan;
  const std::byte* y_rows;     // [padded rows, hidden]; the region y_rows where pulled
  const float* d_weight_rows;  // [padded rows], or nullptr; likewise
  std::int64_t num_tokens;
  std::byte* out;         // [num_tokens, hidden]
  float* d_topk_weights;  // [num_tokens, topk], or nullptr
  std::int32_t experts;   // local ones
};

struct CombineArgs {
  MoveShape shape;
  CombineRank ranks[kMaxDeviceRanks];
};

// Rows of one rank, each by itself.
struct ActivationArgs {
  const std::int64_t* expert_starts;  // [experts + 1]
  const std::int64_t* expert_rows;    // [experts]
  const PlanCounts* counts;
  const RowSource* row_sources;  // [padded rows]
  const void* h;                 // [padded rows, 2 * ffn], gate columns first
  const float* weights;          // [padded rows] topk weight of each row
  void* a;                       // [padded rows, ffn], padding zero
  // Backward only.
  const float* d_a;      // [padded rows, ffn]
  void* d_h;             // [padded rows, 2 * ffn], padding zero
  float* d_weight_rows;  // [padded rows]
  std::int64_t ffn;
  std::int32_t experts;
  std::int32_t element_bytes;
  std::int32_t blocks;
};

// A plain product for every local expert, each element one chain of fma from +0, k ascending.
enum class PlainGemm { fprop, dgrad, wgrad };  // as GemmOp, see grouped_gemm.hpp
struct PlainGemmArgs {
  const std::int64_t* expert_starts;
  const std::int64_t* expert_rows;
  const PlanCounts* counts;
  const void* left;   // fprop: x; otherwise d_y
  const void* right;  // fprop, dgrad: w; wgrad: x
  void* out;
  std::int64_t n;  // w is [experts, n, k]
  std::int64_t k;
  PlainGemm op;
  std::int32_t experts;
  std::int32_t element_bytes;  // of left and right
  std::int32_t out_bytes;      // 2 or 4; element_bytes 4 needs 4
  bool accumulate;             // wgrad: add to out once; experts without rows are left alone
  std::int32_t blocks;
};

// Blocks that can be resident at once on the current device.
cudaError_t count_resident_dispatch_blocks(int* blocks);
cudaError_t count_resident_combine_blocks(int* blocks);
// Cooperative: the blocks are resident together or the launch is refused.
cudaError_t launch_dispatch(const DispatchArgs& args, int num_local_ranks, cudaStream_t stream);
cudaError_t launch_combine(const CombineArgs& args, int num_local_ranks, cudaStream_t stream);
cudaError_t launch_activation(const ActivationArgs& args, cudaStream_t stream);
cudaError_t launch_activation_gradient(const ActivationArgs& args, cudaStream_t stream);
cudaError_t launch_plain_gemm(const PlainGemmArgs& args, cudaStream_t stream);

}  // namespace uniep::cuda
