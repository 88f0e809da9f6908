// SPDX-License-Identifier: Apache-2.0
// What the host passes to the plan's kernel, and what lies where. Host and device see the same
// types; no header here needs more than the standard library.
#pragma once

#include <cstdint>

#include "cuda/symmetric_memory.hpp"
#include "plan/plan.hpp"

namespace uniep::cuda {

inline constexpr int kMaxPlanExperts = 512;    // a block has a thread for each
inline constexpr int kMaxBlocksPerRank = 32;   // a block has a thread for each block of the group
inline constexpr std::uint8_t kNoOwner = 255;  // of a masked choice
inline constexpr int kPlanThreads = 512;
inline constexpr int kPlanWarps = kPlanThreads / 32;

// Where a row comes from: place is token * topk + choice at the source rank. Padding is -1, -1.
struct RowSource {
  std::int32_t rank;
  std::int32_t place;
  bool operator==(const RowSource&) const = default;
};

struct PlanCounts {
  std::int64_t valid;     // 1, or 0 if some rank's ids were refused: then nothing else was written
  std::int64_t num_rows;  // without padding
  std::int64_t num_tiles;
  std::int64_t rows_sent;
};

// The first refused id of the group, by rank, then place. All zeros while there was none.
struct PlanRefusal {
  std::int32_t refused;
  std::int32_t rank;
  std::int32_t place;
  std::int32_t id;
};

// The arrays of uniep::Plan of one rank in device memory, with the same element types and values,
// and the three that the CPU makes elsewhere. Sizes in brackets; what is not listed as used is not
// written: rows beyond the padded ones, tiles beyond num_tiles, places beyond rows_sent.
struct PlanArrays {
  std::int64_t* expert_rows;    // [num_local_experts]
  std::int64_t* expert_starts;  // [num_local_experts + 1]
  std::int64_t* run_starts;     // [num_local_experts, num_ranks]
  std::int64_t* run_rows;       // [num_local_experts, num_ranks]
  std::int64_t* source_starts;  // [num_local_experts, num_ranks]
  std::int64_t* slots;          // [num_tokens, topk]
  std::uint8_t* first_choices;  // [num_tokens, topk]
  std::uint8_t* owners;         // [num_tokens, topk] rank of the choice's expert, or kNoOwner
  std::int32_t* send_order;     // [rows_sent]
  std::int64_t* send_starts;    // [num_experts + 1]
  RowSource* row_sources;       // [padded rows]
  RowTile* tiles;               // [num_tiles], tile_m rows or fewer, in the tile order of experts
  PlanCounts* counts;
  PlanRefusal* refusal;  // kept until the host has seen it
};

// The plan's regions in every rank's part, as offsets from its start.
struct PlanRegions {
  // Signal [kMaxBlocksPerRank]: written by the owner's block, awaited by the owner's blocks; the
  // block's counts and its first refused place become visible.
  std::int64_t block_ready;
  // Signal [num_ranks], by source: written by block 0 of the source, awaited by the owner's blocks;
  // the source's row of `counts` and its word of `refused` become visible. As each rank passed the
  // order_ready of the operation before, no reader of the old counts is left.
  std::int64_t counts_ready;
  // Signal [num_ranks, kMaxBlocksPerRank], by source: written by a block of the source, awaited by
  // the owner's blocks; the block's part of the source's send_order becomes visible, and that it
  // read all counts. The next send_order is written after all counts_ready of its operation, which
  // a rank raises after it has read those of this one.
  std::int64_t order_ready;
  std::int64_t counts;      // [num_ranks, num_experts] u32, rows by source; written by the source
  std::int64_t refused;     // [num_ranks] u64, place << 32 | id, all ones if none; as counts
  std::int64_t send_order;  // [max_tokens, topk] i32, of the last plan; for find_row_sources
};

struct PlanRank {
  const std::int32_t* topk_ids;  // [num_tokens, topk]
  std::int64_t num_tokens;
  PlanArrays out;
  std::uint32_t* block_counts;   // [blocks_per_rank, num_experts]
  std::uint64_t* block_refused;  // [blocks_per_rank]
};

struct PlanArgs {
  GroupView group;
  PlanRegions regions;
  // The placement. Experts by (owner, local) are called the owner order.
  const std::int32_t* rank_of;      // [num_experts]
  const std::int32_t* in_order;     // [num_experts] the expert at each place of the owner order
  const std::int32_t* owner_start;  // [num_ranks + 1] a rank's first place in the owner order
  const std::int32_t* tile_order;   // [num_experts] local experts, each rank from its owner_start
  std::int32_t num_experts;
  std::int32_t topk;
  std::int32_t tile_m;
  std::int32_t blocks_per_rank;
  std::int32_t first_rank;          // of this launch
  PlanRank ranks[kMaxDeviceRanks];  // from first_rank on
};

// Bytes of shared memory that a block needs beyond the static ones.
[[nodiscard]] constexpr std::size_t plan_shared_bytes(int num_experts, int most_local_experts,
                                                      int num_ranks) {
  const auto warp_counts = static_cast<std::size_t>(num_experts) * kPlanWarps * 4;
  const auto runs =
      static_cast<std::size_t>(most_local_experts) * static_cast<std::size_t>(num_ranks) * 8;
  return warp_counts > runs ? warp_counts : runs;
}

// Blocks that can be resident at once on the current device; for the refusal of larger launches.
cudaError_t count_resident_plan_blocks(std::size_t shared_bytes, int* blocks);
// Cooperative: the blocks are resident together or the launch is refused.
cudaError_t launch_plan(const PlanArgs& args, int num_local_ranks, std::size_t shared_bytes,
                        cudaStream_t stream);

}  // namespace uniep::cuda
