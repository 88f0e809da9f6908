// SPDX-License-Identifier: Apache-2.0
// Plans against an independent re-computation that walks every (expert, source, token, choice) of
// the whole group, and the refusals of inputs that disagree.
#include "plan/plan.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace uniep {
namespace {

using Ids = std::vector<std::int32_t>;

// The routing of a whole group: ids of every rank.
struct World {
  Placement placement;
  int topk = 1;
  std::vector<Ids> ids;

  [[nodiscard]] int num_ranks() const { return placement.num_ranks; }
  [[nodiscard]] std::vector<std::int64_t> splits() const {
    std::vector<std::int64_t> all;
    for (const Ids& rank : ids) {
      const auto row = count_splits(rank, topk, placement.num_experts());
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }
  [[nodiscard]] Plan plan(int rank) const {
    const auto all = splits();
    return make_plan({.rank = rank,
                      .topk = topk,
                      .topk_ids = ids[static_cast<std::size_t>(rank)],
                      .splits = all,
                      .placement = &placement});
  }
};

World random_world(std::uint64_t seed, Placement placement, int topk,
                   const std::vector<int>& tokens, bool distinct, std::uint64_t mask_percent) {
  World world{std::move(placement), topk, {}};
  Rng rng(seed);
  const auto num_experts = static_cast<std::uint64_t>(world.placement.num_experts());
  for (const int count : tokens) {
    Ids ids;
    for (int token = 0; token < count; ++token) {
      std::set<std::int32_t> used;
      for (int choice = 0; choice < topk; ++choice) {
        auto id = static_cast<std::int32_t>(rng.below(num_experts));
        while (distinct && !used.insert(id).second) {
          id = static_cast<std::int32_t>(rng.below(num_experts));
        }
        ids.push_back(rng.below(100) < mask_percent ? -1 : id);
      }
    }
    world.ids.push_back(ids);
  }
  return world;
}

// One row of the group: where it comes from and where it goes.
struct Row {
  int owner;
  std::int64_t slot;
};
using Key = std::tuple<int, int, int>;  // source rank, token, choice

// Slots from first principles: walk experts by global id, then sources, tokens and choices.
std::map<Key, Row> naive_rows(const World& world) {
  std::map<Key, Row> rows;
  std::vector<std::int64_t> next(static_cast<std::size_t>(world.num_ranks()), 0);
  for (int expert = 0; expert < world.placement.num_experts(); ++expert) {
    const int owner = world.placement.rank_of[static_cast<std::size_t>(expert)];
    std::int64_t& slot = next[static_cast<std::size_t>(owner)];
    while (slot % 64 != 0) ++slot;
    for (int source = 0; source < world.num_ranks(); ++source) {
      const Ids& ids = world.ids[static_cast<std::size_t>(source)];
      for (std::size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] != expert) continue;
        const int token = static_cast<int>(i) / world.topk;
        rows[{source, token, static_cast<int>(i) % world.topk}] = {owner, slot++};
      }
    }
  }
  return rows;
}

void expect_sender_matches(const World& world, int rank, const std::map<Key, Row>& rows) {
  const Plan plan = world.plan(rank);
  const Ids& ids = world.ids[static_cast<std::size_t>(rank)];
  ASSERT_EQ(plan.rank, rank);
  ASSERT_EQ(plan.num_ranks, world.num_ranks());
  ASSERT_EQ(plan.num_tokens * world.topk, static_cast<std::int64_t>(ids.size()));
  ASSERT_EQ(plan.slots.size(), ids.size());
  ASSERT_EQ(plan.first_choices.size(), ids.size());
  std::set<std::int32_t> sent;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const int token = static_cast<int>(i) / world.topk;
    const int choice = static_cast<int>(i) % world.topk;
    if (ids[i] < 0) {
      ASSERT_EQ(plan.slots[i], -1);
      ASSERT_EQ(plan.first_choices[i], choice);
      continue;
    }
    sent.insert(static_cast<std::int32_t>(i));
    const Row& row = rows.at({rank, token, choice});
    ASSERT_EQ(plan.slots[i], row.slot) << "token " << token << " choice " << choice;
    // Of the token's choices with the same owner the one of the lowest expert, then choice.
    int first = choice;
    for (int other = world.topk - 1; other >= 0; --other) {
      const auto found = rows.find({rank, token, other});
      if (found == rows.end() || found->second.owner != row.owner) continue;
      const std::size_t base = i - static_cast<std::size_t>(choice);
      if (ids[base + static_cast<std::size_t>(other)] <=
          ids[base + static_cast<std::size_t>(first)])
        first = other;
    }
    ASSERT_EQ(plan.first_choices[i], first);
  }
  // The reverse map lists every choice that is sent, once, by (expert, token, choice).
  ASSERT_EQ(std::set<std::int32_t>(plan.send_order.begin(), plan.send_order.end()), sent);
  ASSERT_EQ(plan.send_order.size(), sent.size());
  for (std::size_t i = 1; i < plan.send_order.size(); ++i) {
    const auto before = static_cast<std::size_t>(plan.send_order[i - 1]);
    const auto after = static_cast<std::size_t>(plan.send_order[i]);
    ASSERT_LT(std::pair(ids[before], before), std::pair(ids[after], after));
  }
}

void expect_receiver_matches(const World& world, int rank, const std::map<Key, Row>& rows) {
  const Plan plan = world.plan(rank);
  std::map<std::int64_t, Key> by_slot;
  for (const auto& [key, row] : rows) {
    if (row.owner != rank) continue;
    ASSERT_TRUE(by_slot.emplace(row.slot, key).second) << "slot " << row.slot << " is used twice";
  }
  const auto& experts = world.placement.experts_of[static_cast<std::size_t>(rank)];
  ASSERT_EQ(plan.expert_rows.size(), experts.size());
  ASSERT_EQ(plan.expert_starts.size(), experts.size() + 1);
  ASSERT_EQ(plan.num_rows, static_cast<std::int64_t>(by_slot.size()));
  const auto num_ranks = static_cast<std::size_t>(world.num_ranks());
  std::int64_t covered = 0;
  for (std::size_t local = 0; local < experts.size(); ++local) {
    ASSERT_EQ(plan.expert_starts[local] % kExpertRowAlignment, 0);
    ASSERT_LE(plan.expert_starts[local] + plan.expert_rows[local], plan.expert_starts[local + 1]);
    ASSERT_LT(plan.expert_starts[local + 1] - plan.expert_starts[local] - plan.expert_rows[local],
              kExpertRowAlignment);
    for (std::size_t source = 0; source < num_ranks; ++source) {
      const std::size_t run = local * num_ranks + source;
      const Plan sender = world.plan(static_cast<int>(source));
      const Ids& ids = world.ids[source];
      for (std::int64_t i = 0; i < plan.run_rows[run]; ++i, ++covered) {
        const auto found = by_slot.find(plan.run_starts[run] + i);
        ASSERT_NE(found, by_slot.end());
        // What the owner reads at the source is the choice that this slot belongs to.
        const std::int32_t choice =
            sender.send_order[static_cast<std::size_t>(plan.source_starts[run] + i)];
        ASSERT_EQ(ids[static_cast<std::size_t>(choice)], experts[local]);
        ASSERT_EQ(found->second,
                  Key(static_cast<int>(source), choice / world.topk, choice % world.topk));
      }
    }
  }
  ASSERT_EQ(covered, plan.num_rows);
  ASSERT_EQ(plan.padded_rows() % kExpertRowAlignment, 0);
}

void expect_matches(const World& world) {
  const auto rows = naive_rows(world);
  for (int rank = 0; rank < world.num_ranks(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank) + " of " + std::to_string(world.num_ranks()));
    ASSERT_NO_FATAL_FAILURE(expect_sender_matches(world, rank, rows));
    ASSERT_NO_FATAL_FAILURE(expect_receiver_matches(world, rank, rows));
  }
}

TEST(Plan, EqualsANaiveWalkOverTheGroup) {
  expect_matches(random_world(1, make_contiguous_placement(8, 4), 2, {40, 40, 40, 40}, true, 0));
  expect_matches(random_world(2, make_contiguous_placement(8, 1), 3, {150}, true, 0));
}

TEST(Plan, TenExpertsOverFourRanks) {
  expect_matches(random_world(3, make_contiguous_placement(10, 4), 3, {30, 31, 29, 33}, true, 20));
}

TEST(Plan, ThreeExpertsOverEightRanks) {
  expect_matches(
      random_world(4, make_contiguous_placement(3, 8), 2, {9, 0, 7, 1, 0, 12, 3, 2}, true, 10));
}

TEST(Plan, UnevenAndAbsentTokens) {
  expect_matches(random_world(5, make_contiguous_placement(6, 3), 2, {0, 130, 1}, true, 0));
  expect_matches(random_world(6, make_contiguous_placement(6, 3), 2, {0, 0, 0}, true, 0));
  const World none = random_world(6, make_contiguous_placement(6, 3), 2, {0, 0, 0}, true, 0);
  EXPECT_EQ(none.plan(1).padded_rows(), 0);
  EXPECT_EQ(none.plan(1).num_rows, 0);
}

TEST(Plan, DuplicateIdsAreRowsOfTheirOwn) {
  expect_matches(random_world(7, make_contiguous_placement(2, 2), 5, {20, 21}, false, 15));
  World world{make_contiguous_placement(2, 1), 3, {{1, 1, 1}}};
  expect_matches(world);
  EXPECT_EQ(world.plan(0).slots, (std::vector<std::int64_t>{0, 1, 2}));
  EXPECT_EQ(world.plan(0).first_choices, (std::vector<std::uint8_t>{0, 0, 0}));
}

TEST(Plan, MaskedChoicesHaveNoSlot) {
  World world{make_contiguous_placement(4, 2), 2, {{-1, 3, 0, -1}, {-1, -1, 2, 1}}};
  expect_matches(world);
  EXPECT_EQ(world.plan(0).slots, (std::vector<std::int64_t>{-1, 64, 0, -1}));
  EXPECT_EQ(world.plan(0).num_rows, 2);
  expect_matches(random_world(8, make_contiguous_placement(4, 2), 2, {33, 34}, true, 100));
}

TEST(Plan, ExpertsStartAtMultiplesOf64ForEveryRowCount) {
  for (const int rows : {0, 1, 63, 64, 65, 127, 128, 129}) {
    World world{make_contiguous_placement(2, 1), 1, {}};
    Ids ids(static_cast<std::size_t>(rows), 0);
    ids.push_back(1);
    world.ids = {ids};
    const Plan plan = world.plan(0);
    EXPECT_EQ(plan.expert_starts[1], (rows + 63) / 64 * 64);
    EXPECT_EQ(plan.slots.back(), plan.expert_starts[1]);
  }
}

TEST(Plan, AnyPlacementMap) {
  expect_matches(
      random_world(9, make_placement({2, 0, 2, 1, 0, 0, 3}, 5), 3, {20, 25, 30, 7, 1}, true, 10));
  expect_matches(random_world(10, make_placement({1, 1, 1, 1}, 2), 2, {20, 25}, true, 0));
}

TEST(Plan, ManyRandomGroups) {
  for (std::uint64_t seed = 100; seed < 200; ++seed) {
    Rng rng(seed);
    const int num_ranks = static_cast<int>(1 + rng.below(6));
    const int num_experts = static_cast<int>(1 + rng.below(12));
    std::vector<std::int32_t> map;
    for (int expert = 0; expert < num_experts; ++expert) {
      map.push_back(static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(num_ranks))));
    }
    std::vector<int> tokens;
    for (int rank = 0; rank < num_ranks; ++rank) tokens.push_back(static_cast<int>(rng.below(70)));
    SCOPED_TRACE("seed " + std::to_string(seed));
    ASSERT_NO_FATAL_FAILURE(expect_matches(random_world(seed, make_placement(map, num_ranks),
                                                        static_cast<int>(1 + rng.below(9)), tokens,
                                                        false, rng.below(3) * 20)));
  }
}

TEST(Plan, RowTilesCoverEveryRowOnceInTheGivenOrder) {
  const World world = random_world(11, make_contiguous_placement(3, 1), 2, {150}, true, 10);
  const Plan plan = world.plan(0);
  for (const std::int64_t tile_m : {8, 64, 72, 512}) {
    const std::vector<std::int32_t> order{2, 0, 1};
    std::vector<std::int32_t> seen_order;
    std::set<std::int64_t> rows;
    for (const RowTile& tile : make_row_tiles(plan, tile_m, order)) {
      if (seen_order.empty() || seen_order.back() != tile.local_expert) {
        seen_order.push_back(tile.local_expert);
      }
      const auto expert = static_cast<std::size_t>(tile.local_expert);
      EXPECT_GT(tile.rows, 0);
      EXPECT_LE(tile.rows, tile_m);
      EXPECT_EQ((tile.row - plan.expert_starts[expert]) % tile_m, 0);
      EXPECT_LE(tile.row + tile.rows, plan.expert_starts[expert] + plan.expert_rows[expert]);
      for (std::int64_t row = tile.row; row < tile.row + tile.rows; ++row) {
        EXPECT_TRUE(rows.insert(row).second);
      }
    }
    EXPECT_EQ(seen_order, order);
    EXPECT_EQ(static_cast<std::int64_t>(rows.size()), plan.num_rows);
  }
}

// Expects a refusal that names all of `parts`.
template <typename Body>
void expect_refused(Body body, const std::vector<std::string>& parts) {
  try {
    body();
    ADD_FAILURE() << "accepted; expected a refusal with " << parts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << part << " is not in: " << error.what();
    }
  }
}

TEST(Plan, IdsOutsideTheExpertsAreRefusedWithTheirPlace) {
  for (const std::int32_t bad : {8, 9, -2, 2147483647, -2147483647 - 1}) {
    Ids ids{0, 1, 2, 3, bad, 5};
    expect_refused([&] { static_cast<void>(count_splits(ids, 2, 8)); },
                   {"token 2, choice 0", std::to_string(bad), "0 to 7"});
  }
}

TEST(Plan, InputsThatDisagreeAreRefused) {
  const Placement placement = make_contiguous_placement(4, 2);
  const Ids ids{0, 1, 2};
  std::vector<std::int64_t> splits{1, 1, 1, 0, 0, 0, 0, 0};
  const auto plan_of = [&](int rank, int topk) {
    static_cast<void>(make_plan(
        {.rank = rank, .topk = topk, .topk_ids = ids, .splits = splits, .placement = &placement}));
  };
  EXPECT_NO_THROW(plan_of(0, 1));
  expect_refused([&] { plan_of(0, 2); }, {"topk_ids", "3", "multiple of topk = 2"});
  expect_refused([&] { plan_of(0, 0); }, {"topk is 0", "1 to 64"});
  expect_refused([&] { plan_of(0, 65); }, {"topk is 65", "1 to 64"});
  expect_refused([&] { plan_of(2, 1); }, {"rank is 2", "0 to 1"});
  expect_refused([&] { plan_of(-1, 1); }, {"rank is -1"});
  splits[2] = 2;
  expect_refused([&] { plan_of(0, 1); }, {"rank 0 sends 2 rows to expert 2", "hold 1"});
  splits.pop_back();
  expect_refused([&] { plan_of(0, 1); }, {"splits has 7", "= 8"});
}

TEST(Placement, FirstRanksOwnOneMore) {
  const Placement ten = make_contiguous_placement(10, 4);
  EXPECT_EQ(ten.experts_of,
            (std::vector<std::vector<std::int32_t>>{{0, 1, 2}, {3, 4, 5}, {6, 7}, {8, 9}}));
  EXPECT_EQ(ten.local_of, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2, 0, 1, 0, 1}));
  const Placement three = make_contiguous_placement(3, 8);
  for (int rank = 0; rank < 8; ++rank) EXPECT_EQ(three.num_local_experts(rank), rank < 3 ? 1 : 0);
}

TEST(Placement, BadMapsAreRefused) {
  expect_refused(
      [] {
        static_cast<void>(make_placement({0, 2}, 2));
      },
      {"expert 1", "rank 2", "0 to 1"});
  expect_refused([] { static_cast<void>(make_placement({-1}, 2)); }, {"expert 0", "rank -1"});
  expect_refused([] { static_cast<void>(make_placement({}, 2)); }, {"num_experts is 0"});
  expect_refused([] { static_cast<void>(make_contiguous_placement(0, 2)); }, {"num_experts is 0"});
  expect_refused([] { static_cast<void>(make_contiguous_placement(2, 0)); }, {"num_ranks is 0"});
}

}  // namespace
}  // namespace uniep
