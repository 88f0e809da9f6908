// SPDX-License-Identifier: Apache-2.0
// Each routing generator keeps the property it is named for, over many shapes.
#include "io/routing.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>

#include "base/error.hpp"

namespace uniep {
namespace {

struct Grid {
  int num_ranks;
  std::int64_t tokens;
  int num_experts;
  int topk;
};

constexpr Grid kGrids[] = {{2, 0, 2, 1},     {2, 1, 8, 2},   {4, 257, 10, 3}, {8, 300, 64, 6},
                           {3, 100, 2, 2},   {8, 64, 5, 5},  {2, 50, 2, 7},   {1, 40, 8, 2},
                           {4, 129, 160, 8}, {5, 33, 64, 64}};

Routing make(const std::string& name, const Grid& grid, double mask = 0, std::uint64_t seed = 3,
             int call = 0) {
  return make_routing(parse_routing(name), grid.num_ranks, grid.tokens, grid.num_experts, grid.topk,
                      mask, seed, call);
}

std::vector<std::int64_t> splits(const Routing& routing, int num_experts) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(num_experts), 0);
  for (const std::int32_t expert : routing.topk_ids) {
    if (expert >= 0) ++counts[static_cast<std::size_t>(expert)];
  }
  return counts;
}

std::vector<std::int64_t> rank_splits(const Routing& routing, const Grid& grid) {
  const auto counts = splits(routing, grid.num_experts);
  std::vector<std::int64_t> rows;
  auto begin = counts.begin();
  for (const std::int64_t owned : split_evenly(grid.num_experts, grid.num_ranks)) {
    rows.push_back(std::accumulate(begin, begin + owned, std::int64_t{0}));
    begin += owned;
  }
  return rows;
}

std::int64_t total(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

// EXPECT_NEAR takes doubles; counts here are far below 2^53.
double as_double(std::int64_t value) { return static_cast<double>(value); }

void expect_well_formed(const Routing& routing, const Grid& grid) {
  const auto num_choices = static_cast<std::size_t>(grid.tokens * grid.topk);
  ASSERT_EQ(routing.topk_ids.size(), num_choices);
  ASSERT_EQ(routing.topk_weights.size(), num_choices);
  ASSERT_EQ(routing.tokens_per_rank.size(), static_cast<std::size_t>(grid.num_ranks));
  EXPECT_EQ(total(routing.tokens_per_rank), grid.tokens);
  const auto topk = static_cast<std::size_t>(grid.topk);
  for (std::size_t begin = 0; begin < num_choices; begin += topk) {
    std::multiset<std::int32_t> seen;
    float sum = 0;
    for (std::size_t i = begin; i < begin + topk; ++i) {
      const std::int32_t expert = routing.topk_ids[i];
      ASSERT_TRUE(expert >= -1 && expert < grid.num_experts) << expert;
      if (expert >= 0) seen.insert(expert);
      ASSERT_GT(routing.topk_weights[i], 0);
      sum += routing.topk_weights[i];
    }
    EXPECT_NEAR(sum, 1, 1e-5);
    if (grid.topk > grid.num_experts) continue;
    for (const std::int32_t expert : seen) ASSERT_EQ(seen.count(expert), 1U) << "duplicate";
  }
}

TEST(Routing, EveryNameIsWellFormedAndRepeatable) {
  for (const char* name : {"W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "uniform", "zipf:1.2",
                           "zipf:0", "zipf:16", "one-hot", "empty-ranks"}) {
    for (const Grid& grid : kGrids) {
      const std::string text = name;
      if (grid.num_ranks == 1 && (text == "W4" || text == "W5" || text == "empty-ranks")) {
        EXPECT_THROW(static_cast<void>(make(name, grid)), Error) << name;
        continue;
      }
      SCOPED_TRACE(text + " ranks " + std::to_string(grid.num_ranks) + " experts " +
                   std::to_string(grid.num_experts) + " topk " + std::to_string(grid.topk));
      const Routing routing = make(name, grid);
      expect_well_formed(routing, grid);
      EXPECT_EQ(routing.topk_ids, make(name, grid).topk_ids);
      const bool may_mask = text == "W5" || text == "empty-ranks";
      const bool is_masked = total(splits(routing, grid.num_experts)) != grid.tokens * grid.topk;
      EXPECT_TRUE(may_mask || !is_masked);
    }
  }
}

TEST(Routing, BalancedIsEvenAndBlindToRanks) {
  const Grid grid{4, 4000, 16, 4};
  const Routing routing = make("W0", grid);
  for (const std::int64_t count : splits(routing, 16)) EXPECT_NEAR(as_double(count), 1000, 150);
  EXPECT_EQ(routing.tokens_per_rank, std::vector<std::int64_t>(4, 1000));
  for (const char* name : {"W0", "W1", "zipf:1", "one-hot"}) {
    EXPECT_EQ(make(name, grid).topk_ids, make(name, {8, 4000, 16, 4}).topk_ids) << name;
  }
  EXPECT_NE(routing.topk_ids, make("W0", grid, 0, 4).topk_ids) << "another seed";
  EXPECT_NE(routing.topk_ids, make("W0", grid, 0, 3, 1).topk_ids) << "another call";
}

TEST(Routing, HotExpertsTakeFourFifths) {
  const Routing routing = make("W1", {4, 1000, 100, 8});
  auto counts = splits(routing, 100);
  std::sort(counts.rbegin(), counts.rend());
  counts.resize(10);
  EXPECT_NEAR(as_double(total(counts)), 6400, 5);
}

TEST(Routing, HotRankTakesFourFifthsAndRotates) {
  const Grid grid{4, 1000, 64, 8};
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_NEAR(as_double(rank_splits(make("W2", grid, 0, seed), grid)[seed]), 6400, 5);
    for (int call = 0; call < 6; ++call) {
      const auto rows = rank_splits(make("W6", grid, 0, seed, call), grid);
      EXPECT_NEAR(as_double(rows[(seed + static_cast<std::uint64_t>(call)) % 4]), 6400, 5);
    }
  }
}

TEST(Routing, SpreadHotHasOneHotExpertOnEachRank) {
  const Grid grid{4, 1000, 30, 4};
  const auto counts = splits(make("W3", grid), 30);
  const auto rows = rank_splits(make("W3", grid), grid);
  std::size_t expert = 0;
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const auto owned = static_cast<std::size_t>(split_evenly(30, 4)[rank]);
    const std::int64_t most = *std::max_element(counts.begin() + static_cast<long>(expert),
                                                counts.begin() + static_cast<long>(expert + owned));
    EXPECT_NEAR(as_double(most), as_double(rows[rank] / 2), as_double(rows[rank] / 10 + 1));
    expert += owned;
  }
}

TEST(Routing, RaggedLeavesEachRankEmptyInTurn) {
  for (const int num_ranks : {2, 3, 8}) {
    for (int empty = 0; empty < num_ranks; ++empty) {
      const auto tokens = make("W4", {num_ranks, 1000, 16, 2}, 0, static_cast<std::uint64_t>(empty))
                              .tokens_per_rank;
      EXPECT_EQ(tokens[static_cast<std::size_t>(empty)], 0);
      EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 0), 1);
      EXPECT_EQ(total(tokens), 1000);
      EXPECT_EQ(std::set<std::int64_t>(tokens.begin(), tokens.end()).size(), tokens.size());
    }
  }
}

TEST(Routing, StarvedRanksGetNothing) {
  for (const Grid& grid : {Grid{4, 200, 10, 3}, Grid{8, 200, 5, 4}, Grid{2, 200, 2, 2}}) {
    const auto owners = static_cast<std::uint64_t>(std::min(grid.num_ranks, grid.num_experts));
    for (std::uint64_t rank = 0; rank < owners; ++rank) {
      const auto rows = rank_splits(make("W5", grid, 0, rank), grid);
      EXPECT_EQ(rows[rank], 0);
      EXPECT_GT(total(rows), 0);
    }
    const auto rows = rank_splits(make("empty-ranks", grid), grid);
    for (std::size_t rank = 0; rank < rows.size(); ++rank) {
      EXPECT_EQ(rows[rank] == 0, rank % 2 == 1 || rank >= owners) << rank;
    }
  }
}

TEST(Routing, OneHotAndBurst) {
  const Grid grid{4, 100, 8, 2};
  const auto counts = splits(make("one-hot", grid, 0, 7), 8);
  EXPECT_EQ(counts, (std::vector<std::int64_t>{100, 0, 0, 0, 0, 0, 0, 100}));
  for (int call = 0; call < 8; ++call) {
    const char* same = call % 4 == 3 ? "one-hot" : "W0";
    EXPECT_EQ(make("W7", grid, 0, 7, call).topk_ids, make(same, grid, 0, 7, call).topk_ids) << call;
  }
}

TEST(Routing, ZipfFallsOff) {
  auto counts = splits(make("zipf:1", {2, 20'000, 8, 1}), 8);
  std::sort(counts.rbegin(), counts.rend());
  for (std::size_t i = 1; i < 8; ++i) {
    const double ratio = static_cast<double>(counts[0]) / static_cast<double>(counts[i]);
    EXPECT_NEAR(ratio, static_cast<double>(i + 1), 0.15 * static_cast<double>(i + 1));
  }
}

TEST(Routing, MaskKeepsTheOtherChoicesAndAllWeights) {
  const Grid grid{2, 1000, 16, 4};
  const Routing plain = make("W0", grid);
  const Routing masked = make("W0", grid, 0.25);
  std::int64_t num_masked = 0;
  for (std::size_t i = 0; i < plain.topk_ids.size(); ++i) {
    if (masked.topk_ids[i] == -1) {
      ++num_masked;
    } else {
      ASSERT_EQ(masked.topk_ids[i], plain.topk_ids[i]);
    }
  }
  EXPECT_NEAR(as_double(num_masked), 1000, 120);
  EXPECT_EQ(masked.topk_weights, plain.topk_weights);
  EXPECT_EQ(total(splits(make("W0", grid, 1), 16)), 0);
}

TEST(Routing, RefusesUnknownNamesAndBadSizes) {
  for (const char* name : {"", "W8", "w0", "W00", "zipf", "zipf:", "zipf:-1", "zipf:nan", "zipf:1x",
                           "zipf:17", "file:", "hot"}) {
    EXPECT_THROW(static_cast<void>(parse_routing(name)), Error) << name;
  }
  try {
    static_cast<void>(parse_routing("nonsense"));
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("W0 to W7, uniform, zipf:S"), std::string::npos);
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const double mask : {-0.1, 1.1, nan}) {
    EXPECT_THROW(static_cast<void>(make("W0", {1, 1, 1, 1}, mask)), Error);
  }
  for (const Grid& grid : {Grid{0, 1, 1, 1}, Grid{1, -1, 1, 1}, Grid{1, 1, 0, 1}, Grid{1, 1, 1, 0},
                           Grid{1, 1, 1, 65}}) {
    EXPECT_THROW(static_cast<void>(make("W0", grid)), Error);
  }
  EXPECT_THROW(static_cast<void>(make("W0", {1, 1, 1, 1}, 0, 0, -1)), Error);
}

TEST(Routing, ReadsAFile) {
  const auto path =
      (std::filesystem::temp_directory_path() / ("uniep-routing-" + std::to_string(::getpid())))
          .string();
  TensorFile file;
  file.tensors["topk_ids"] =
      make_tensor(DType::i64, {2, 2}, std::vector<std::int64_t>{3, -1, 0, 0});
  write_tensor_file(path, file);
  const Routing routing = make("file:" + path, {2, 2, 4, 2});
  EXPECT_EQ(routing.topk_ids, (std::vector<std::int32_t>{3, -1, 0, 0}));
  EXPECT_EQ(routing.topk_weights.size(), 4U);
  EXPECT_THROW(static_cast<void>(make("file:" + path, {2, 3, 4, 2})), Error) << "tokens";
  EXPECT_THROW(static_cast<void>(make("file:" + path, {2, 2, 3, 2})), Error) << "expert 3 of 3";

  const std::vector<float> weights = {0.5F, 0.25F, 1, 0};
  file.tensors["topk_weights"] = make_tensor(DType::f32, {2, 2}, weights);
  write_tensor_file(path, file);
  EXPECT_EQ(make("file:" + path, {2, 2, 4, 2}).topk_weights, weights);
  file.tensors.erase("topk_ids");
  write_tensor_file(path, file);
  EXPECT_THROW(static_cast<void>(make("file:" + path, {2, 2, 4, 2})), Error);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace uniep
