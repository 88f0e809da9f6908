// SPDX-License-Identifier: Apache-2.0
// Routings of a whole group and the plans that the CPU makes of them: what the device must equal.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/plan.hpp"
#include "plan/plan.hpp"
#include "topo/placement.hpp"

namespace uniep::cuda_test {

enum class IdKind {
  distinct,    // a token's experts differ
  duplicates,  // drawn one by one
  one_expert,  // every choice is expert 0
  neighbours,  // a random expert and those after it, cyclically
};

struct Routing {
  std::string name;
  Placement placement;
  int topk = 1;
  std::vector<std::int64_t> tokens;  // [num_ranks]
  IdKind kind = IdKind::distinct;
  std::uint64_t mask_percent = 0;
  int tile_m = 128;
  int blocks_per_rank = 16;
  std::vector<std::vector<std::int32_t>> tile_orders = {};  // empty: ascending
};

// What a rank of the device plan must hold.
struct Expected {
  Plan plan;
  std::vector<std::uint8_t> owners;
  std::vector<cuda::RowSource> row_sources;
  std::vector<RowTile> tiles;
};

[[nodiscard]] std::vector<std::vector<std::int32_t>> make_ids(const Routing& routing,
                                                              std::uint64_t seed);
[[nodiscard]] std::vector<Expected> expect_plans(const Routing& routing,
                                                 const std::vector<std::vector<std::int32_t>>& ids);
[[nodiscard]] std::vector<Routing> routings(bool quick);
// T = 8192, k = 8, E = 256, even.
[[nodiscard]] Routing bench_routing(int num_ranks, int blocks_per_rank);

}  // namespace uniep::cuda_test
