// SPDX-License-Identifier: Apache-2.0
#include "plan_world.hpp"

#include <algorithm>
#include <numeric>

#include "base/rng.hpp"

namespace uniep::cuda_test {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int32_t draw(Rng& rng, int num_experts) {
  return static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(num_experts)));
}

// A placement that is not contiguous, in which some ranks may own nothing.
Placement scattered(int num_experts, int num_ranks, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<std::int32_t> rank_of;
  for (int expert = 0; expert < num_experts; ++expert) rank_of.push_back(draw(rng, num_ranks));
  return make_placement(rank_of, num_ranks);
}

std::vector<std::vector<std::int32_t>> descending_tiles(const Placement& placement) {
  std::vector<std::vector<std::int32_t>> orders;
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    std::vector<std::int32_t> order(at(placement.num_local_experts(rank)));
    std::iota(order.rbegin(), order.rend(), 0);
    orders.push_back(order);
  }
  return orders;
}

std::vector<std::int64_t> even(int num_ranks, std::int64_t tokens) {
  return std::vector<std::int64_t>(at(num_ranks), tokens);
}

// Some ranks have none, one has one.
std::vector<std::int64_t> ragged(int num_ranks, std::int64_t most) {
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < num_ranks; ++rank) {
    tokens.push_back(rank % 3 == 1 ? 0 : rank % 4 == 2 ? 1 : most - rank);
  }
  return tokens;
}

void add_small(std::vector<Routing>& list, int num_ranks) {
  const auto contiguous = [&](int experts) {
    return make_contiguous_placement(experts, num_ranks);
  };
  list.push_back(
      {.name = "E=8 k=2", .placement = contiguous(8), .topk = 2, .tokens = even(num_ranks, 40)});
  list.push_back({.name = "E=10 k=3, masked, ragged",
                  .placement = contiguous(10),
                  .topk = 3,
                  .tokens = ragged(num_ranks, 131),
                  .mask_percent = 20,
                  .blocks_per_rank = 3});
  list.push_back({.name = "E=3 k=2, fewer experts than ranks",
                  .placement = contiguous(3),
                  .topk = 2,
                  .tokens = ragged(num_ranks, 70),
                  .mask_percent = 10,
                  .tile_m = 64});
  list.push_back({.name = "E=2 k=5, duplicates",
                  .placement = contiguous(2),
                  .topk = 5,
                  .tokens = even(num_ranks, 65),
                  .kind = IdKind::duplicates,
                  .mask_percent = 15,
                  .tile_m = 72});
  list.push_back({.name = "E=4 k=2, all masked",
                  .placement = contiguous(4),
                  .topk = 2,
                  .tokens = even(num_ranks, 33),
                  .mask_percent = 100});
  list.push_back({.name = "E=6 k=2, no tokens at all",
                  .placement = contiguous(6),
                  .topk = 2,
                  .tokens = even(num_ranks, 0)});
  list.push_back({.name = "E=1 k=1, one expert",
                  .placement = contiguous(1),
                  .topk = 1,
                  .tokens = even(num_ranks, 129),
                  .kind = IdKind::one_expert,
                  .blocks_per_rank = 1});
  const Placement map = scattered(37, num_ranks, 5);
  list.push_back({.name = "E=37 k=9, scattered map, tiles descending",
                  .placement = map,
                  .topk = 9,
                  .tokens = ragged(num_ranks, 150),
                  .kind = IdKind::duplicates,
                  .mask_percent = 10,
                  .tile_m = 48,
                  .blocks_per_rank = 5,
                  .tile_orders = descending_tiles(map)});
  list.push_back(
      {.name = "E=37 k=32, all on the last rank",
       .placement = make_placement(
           std::vector<std::int32_t>(37, static_cast<std::int32_t>(num_ranks - 1)), num_ranks),
       .topk = 32,
       .tokens = even(num_ranks, 77),
       .mask_percent = 5});
}

void add_large(std::vector<Routing>& list, int num_ranks) {
  const int blocks = num_ranks <= 8 ? 32 : 16;
  list.push_back(bench_routing(num_ranks, 16));
  list.push_back({.name = "E=256 k=8 T=8192, all to one expert",
                  .placement = make_contiguous_placement(256, num_ranks),
                  .topk = 8,
                  .tokens = even(num_ranks, 8192),
                  .kind = IdKind::one_expert,
                  .blocks_per_rank = blocks});
  list.push_back({.name = "E=384 k=6 T=5000, masked, ragged",
                  .placement = make_contiguous_placement(384, num_ranks),
                  .topk = 6,
                  .tokens = ragged(num_ranks, 5000),
                  .kind = IdKind::neighbours,
                  .mask_percent = 7});
  list.push_back({.name = "E=512 k=64 T=8192, scattered map",
                  .placement = scattered(512, num_ranks, 6),
                  .topk = 64,
                  .tokens = even(num_ranks, num_ranks <= 2 ? 8192 : 1024),
                  .kind = IdKind::neighbours,
                  .mask_percent = 3,
                  .blocks_per_rank = blocks});
}

}  // namespace

std::vector<std::vector<std::int32_t>> make_ids(const Routing& routing, std::uint64_t seed) {
  const int num_experts = routing.placement.num_experts();
  std::vector<std::vector<std::int32_t>> all;
  for (std::size_t rank = 0; rank < routing.tokens.size(); ++rank) {
    Rng rng(seed, rank);
    std::vector<std::int32_t> ids;
    ids.reserve(at(routing.tokens[rank] * routing.topk));
    std::vector<std::int64_t> last_token(at(num_experts), -1);  // that drew the expert
    for (std::int64_t token = 0; token < routing.tokens[rank]; ++token) {
      const std::int32_t first = draw(rng, num_experts);
      for (int choice = 0; choice < routing.topk; ++choice) {
        std::int32_t id = 0;
        if (routing.kind == IdKind::neighbours) id = (first + choice) % num_experts;
        if (routing.kind == IdKind::distinct || routing.kind == IdKind::duplicates) {
          id = draw(rng, num_experts);
          while (routing.kind == IdKind::distinct && choice < num_experts &&
                 last_token[at(id)] == token) {
            id = (id + 1) % num_experts;
          }
          last_token[at(id)] = token;
        }
        ids.push_back(rng.below(100) < routing.mask_percent ? -1 : id);
      }
    }
    all.push_back(std::move(ids));
  }
  return all;
}

std::vector<Expected> expect_plans(const Routing& routing,
                                   const std::vector<std::vector<std::int32_t>>& ids) {
  const Placement& placement = routing.placement;
  std::vector<std::int64_t> splits;
  for (const auto& rank : ids) {
    const auto row = count_splits(rank, routing.topk, placement.num_experts());
    splits.insert(splits.end(), row.begin(), row.end());
  }
  std::vector<Expected> all;
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    Expected expected{.plan = make_plan({.rank = rank,
                                         .topk = routing.topk,
                                         .topk_ids = ids[at(rank)],
                                         .splits = splits,
                                         .placement = &placement}),
                      .owners = {},
                      .row_sources = {},
                      .tiles = {}};
    std::vector<std::int32_t> order(at(placement.num_local_experts(rank)));
    std::iota(order.begin(), order.end(), 0);
    if (!routing.tile_orders.empty()) order = routing.tile_orders[at(rank)];
    expected.tiles = make_row_tiles(expected.plan, routing.tile_m, order);
    for (const std::int32_t id : ids[at(rank)]) {
      const std::int32_t owner = id < 0 ? cuda::kNoOwner : placement.rank_of[at(id)];
      expected.owners.push_back(static_cast<std::uint8_t>(owner));
    }
    expected.row_sources.assign(at(expected.plan.padded_rows()), {-1, -1});
    all.push_back(std::move(expected));
  }
  for (int source = 0; source < placement.num_ranks; ++source) {
    const auto& slots = all[at(source)].plan.slots;
    for (std::size_t place = 0; place < slots.size(); ++place) {
      const std::int32_t id = ids[at(source)][place];
      if (id < 0) continue;
      all[at(placement.rank_of[at(id)])].row_sources[at(slots[place])] = {
          source, static_cast<std::int32_t>(place)};
    }
  }
  return all;
}

std::vector<Routing> routings(bool quick) {
  std::vector<Routing> list;
  for (const int num_ranks : {1, 2, 3, 4, 8, 16}) {
    if (quick && num_ranks != 1 && num_ranks != 3) continue;
    add_small(list, num_ranks);
    if (!quick) add_large(list, num_ranks);
  }
  return list;
}

Routing bench_routing(int num_ranks, int blocks_per_rank) {
  return {.name = "E=256 k=8 T=8192",
          .placement = make_contiguous_placement(256, num_ranks),
          .topk = 8,
          .tokens = even(num_ranks, 8192),
          .blocks_per_rank = blocks_per_rank};
}

}  // namespace uniep::cuda_test
