// SPDX-License-Identifier: Apache-2.0
// The plan of one step: where every row goes. A pure function of this rank's topk_ids and every
// rank's splits, with no backend and no communicator in sight. It is the only place that decides
// order: expert (ascending global id), then source rank, then token, then choice. Forward and
// backward use the same plan.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/limits.hpp"
#include "topo/placement.hpp"

namespace uniep {

inline constexpr std::int64_t kExpertRowAlignment = 64;  // rows; every expert starts on a multiple

struct PlanInput {
  int rank = 0;
  int topk = 1;                            // 1 to kMaxTopk
  std::span<const std::int32_t> topk_ids;  // [num_tokens, topk]; -1 is masked
  std::span<const std::int64_t> splits;    // [num_ranks, num_experts] rows, from count_splits
  const Placement* placement = nullptr;
};

struct Plan {
  int rank = 0;
  int num_ranks = 1;
  int topk = 1;
  std::int64_t num_tokens = 0;

  // As a receiver: this rank's expert-major rows.
  std::vector<std::int64_t> expert_rows;    // [num_local_experts] rows without padding
  std::vector<std::int64_t> expert_starts;  // [num_local_experts + 1] multiples of 64
  std::vector<std::int64_t> run_starts;     // [num_local_experts, num_ranks] first slot of a run
  std::vector<std::int64_t> run_rows;       // [num_local_experts, num_ranks]
  std::vector<std::int64_t> source_starts;  // [num_local_experts, num_ranks] where the run starts
                                            // in the source rank's send_order
  std::int64_t num_rows = 0;                // without padding

  // As a sender.
  std::vector<std::int64_t> slots;          // [num_tokens, topk] row at the owner; -1 masked
  std::vector<std::uint8_t> first_choices;  // [num_tokens, topk] of the token's choices that go to
                                            // the same rank the first in send_order; a choice equal
                                            // to it carries the row
  std::vector<std::int32_t> send_order;     // [rows sent] token * topk + choice, by (expert, token,
                                            // choice): the reverse map of `slots`
  std::vector<std::int64_t> send_starts;    // [num_experts + 1] where an expert's rows start there

  [[nodiscard]] std::int64_t padded_rows() const { return expert_starts.back(); }
};

// A piece of GEMM work: rows [row, row + rows) of one local expert.
struct RowTile {
  std::int32_t local_expert = 0;
  std::int32_t rows = 0;
  std::int64_t row = 0;
};

// Rows this rank sends to each expert, [num_experts]. Errors: invalid_argument names the token and
// choice whose id is outside -1 ... num_experts - 1.
[[nodiscard]] std::vector<std::int64_t> count_splits(std::span<const std::int32_t> topk_ids,
                                                     int topk, int num_experts);

// Errors: invalid_argument if sizes disagree or splits[rank] is not what topk_ids count to.
[[nodiscard]] Plan make_plan(const PlanInput& input);

// Tiles of at most tile_m rows, experts in the given order of local experts.
[[nodiscard]] std::vector<RowTile> make_row_tiles(const Plan& plan, std::int64_t tile_m,
                                                  std::span<const std::int32_t> expert_order);

}  // namespace uniep
