// SPDX-License-Identifier: Apache-2.0
// What a step asks of a GPU: sizes, where the ranks sit, and a summary of the routing. Busiest
// ranks decide, so every count is the largest of any rank.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "schedule/space.hpp"

namespace uniep::simulate {

// Ranks r x ranks_per_gpu to (r + 1) x ranks_per_gpu - 1 share GPU r; likewise GPUs of a node.
struct Topology {
  int ranks = 1;  // 1 to 1024
  int ranks_per_gpu = 1;
  int gpus_per_node = 8;
};

// Where rows go: to experts of the own rank, of a rank on the same GPU, in the node, elsewhere.
enum Way { own, near, up, out };
inline constexpr int kWays = 4;
using ByWay = std::array<double, kWays>;

// The groups of rows that the products of a rank run over.
struct Groups {
  double rows = 0;
  double experts = 0;  // that the rank owns, with rows or without
  double tiles = 0;    // of at most 256 rows, added up over experts
  double blocks = 0;   // of 64 rows, likewise
  double widest = 0;   // rows of the largest tile
};
[[nodiscard]] Groups groups_of(std::span<const std::int64_t> expert_rows);

struct Load {
  LayerSizes sizes;  // tokens: of the rank that has most
  Topology topology;
  Groups groups;       // of the rank with most rows
  ByWay choices{};     // rows of the busiest sender, one for each choice
  ByWay rows{};        // one for each (token, destination rank)
  ByWay in_choices{};  // of the busiest receiver
  ByWay in_rows{};
  double skew = 1;  // rows of the busiest rank over those of the average one
};

// Errors of both: invalid_argument for sizes or ranks that cannot be.

// Expectations for experts drawn uniformly, a token's all distinct; the busiest rank gets `skew`
// times the average (at most what all ranks send).
[[nodiscard]] Load uniform_load(const LayerSizes& sizes, const Topology& topology, double skew = 1);

// Of a routing: choices of all ranks' tokens, -1 masked, rank after rank.
[[nodiscard]] Load load_of(const LayerSizes& sizes, const Topology& topology,
                           std::span<const std::int64_t> tokens_per_rank,
                           std::span<const std::int32_t> topk_ids);

// "even" (to 1.1), "mild" (to 1.5), "strong" (to 3) or "extreme".
[[nodiscard]] std::string skew_class(double skew);

}  // namespace uniep::simulate
