// SPDX-License-Identifier: Apache-2.0
// The same bits as sequential execution, whatever the number of ranks and the schedule.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layer_support.hpp"

namespace uniep::test {
namespace {

const std::vector<int> kRanks{1, 2, 4, 8};

class Bits : public ::testing::TestWithParam<DType> {
 protected:
  [[nodiscard]] Case make(const Sizes& sizes, const std::string& routing = "W0", int ranks = 1,
                          double mask = 0, std::uint64_t seed = 1) const {
    return random_case(sizes, GetParam(), routing, ranks, mask, seed);
  }
};

INSTANTIATE_TEST_SUITE_P(Dtypes, Bits, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

TEST_P(Bits, EqualOverRanksAndManySchedules) {
  expect_invariant(make({.tokens = 50, .hidden = 72, .ffn = 136}), kRanks, 25);
}

TEST_P(Bits, EveryCornerOfTheScheduleSpace) {
  const Case data = make({.tokens = 37, .hidden = 72, .ffn = 72, .experts = 6, .topk = 3});
  const CaseResult expected = run_case_sequential(data, true);
  for (int corner = 0; corner < 128; ++corner) {
    Schedule s;
    s.fusion = static_cast<Fusion>(corner & 1);
    s.payload = static_cast<Payload>(corner >> 1 & 1);
    s.direction = static_cast<Direction>(corner >> 2 & 1);
    s.expert_order = static_cast<ExpertOrder>(corner >> 3 & 1);
    s.destination_order = static_cast<DestinationOrder>(corner >> 4 & 1);
    s.wgrad = static_cast<WgradOrder>(corner >> 5 & 1);
    s.workers = 2;
    s.comm_workers = corner >> 6;
    s.chunk = 3;
    s.tile_m = 8;
    s.tile_n = 64;
    expect_equal(data, expected, run(data, 3, s), to_string(s));
    if (HasFailure()) return;
  }
}

TEST_P(Bits, EveryTileSize) {
  const Case data = make({.tokens = 90, .hidden = 136, .ffn = 72, .experts = 2, .topk = 2});
  const CaseResult expected = run_case_sequential(data, true);
  for (const std::int32_t tile_m : {8, 24, 64, 96, 512}) {
    for (const std::int32_t tile_n : {64, 128, 1024}) {
      Schedule s;
      s.tile_m = tile_m;
      s.tile_n = tile_n;
      s.workers = 2;
      expect_equal(data, expected, run(data, 2, s), to_string(s));
    }
  }
}

TEST_P(Bits, OneHot) {
  expect_invariant(make({.tokens = 70}, "one-hot"), kRanks, 6);
  expect_invariant(make({.tokens = 70, .topk = 1}, "one-hot", 1, 0, 7), kRanks, 6);
}

TEST_P(Bits, EmptyRanks) {
  for (const int ranks : {2, 4, 8}) {
    expect_invariant(make({.tokens = 40}, "empty-ranks", ranks), {ranks}, 8);
  }
}

TEST_P(Bits, UnevenTokens) {
  for (const int ranks : {2, 4, 8}) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      expect_invariant(make({.tokens = 61}, "W4", ranks, 0, seed), {ranks, 1}, 4);
    }
  }
}

TEST_P(Bits, AllTokensOnOneRank) {
  Case data = make({.tokens = 33});
  data.tokens_per_rank = {0, 33, 0, 0};
  expect_invariant(data, {4}, 8);
  data.tokens_per_rank = {33, 0};
  expect_invariant(data, {2}, 8);
}

TEST_P(Bits, TenExpertsOverFourRanks) {
  expect_invariant(make({.tokens = 45, .experts = 10, .topk = 3}), {1, 4}, 15);
}

TEST_P(Bits, ThreeExpertsOverEightRanks) {
  expect_invariant(make({.tokens = 45, .experts = 3, .topk = 2}), {1, 8}, 15);
}

TEST_P(Bits, OneChoice) { expect_invariant(make({.tokens = 40, .topk = 1}), kRanks, 6); }

TEST_P(Bits, AsManyChoicesAsExperts) {
  expect_invariant(make({.tokens = 20, .experts = 8, .topk = 8}), kRanks, 6);
  expect_invariant(make({.tokens = 20, .experts = 1, .topk = 1}), kRanks, 6);
}

TEST_P(Bits, MaskedChoices) {
  expect_invariant(make({.tokens = 40, .topk = 3}, "W0", 1, 0.4), kRanks, 6);
}

TEST_P(Bits, MaskedChoicesIgnoreTheirWeight) {
  Case data = make({.tokens = 40, .topk = 3}, "W0", 1, 0.4);
  const CaseResult before = run_case_sequential(data, true);
  for (std::size_t i = 0; i < data.topk_ids.size(); ++i) {
    if (data.topk_ids[i] < 0) data.topk_weights[i] = std::numeric_limits<float>::quiet_NaN();
  }
  expect_equal(data, before, run_case_sequential(data, true), "sequential");
  expect_invariant(data, {1, 2, 4}, 6);
  for (std::size_t i = 0; i < data.topk_ids.size(); ++i) {
    if (data.topk_ids[i] < 0) {
      ASSERT_EQ(before.d_topk_weights[i], 0.0F);
    }
  }
}

TEST_P(Bits, TokensWithoutAnyChoiceGiveZeros) {
  Case data = make({.tokens = 24});
  for (const std::size_t token : {0U, 5U, 6U, 23U}) {
    data.topk_ids[token * 2] = data.topk_ids[token * 2 + 1] = -1;
  }
  expect_invariant(data, kRanks, 6);
  const CaseResult result = run(data, 2, {});
  with_storage(data, [&]<typename S>(S) {
    for (const std::size_t token : {0U, 5U, 6U, 23U}) {
      for (std::size_t n = 0; n < 24; ++n) {
        ASSERT_EQ(cpu::widen(values_of<S>(result.out)[token * 24 + n]), 0.0F);
        ASSERT_EQ(cpu::widen(values_of<S>(result.d_x)[token * 24 + n]), 0.0F);
      }
    }
  });
}

TEST_P(Bits, EverythingMasked) { expect_invariant(make({.tokens = 24}, "W0", 1, 1.0), kRanks, 4); }

TEST_P(Bits, DuplicateIds) {
  Case data = make({.tokens = 30, .experts = 4, .topk = 5});  // more choices than experts
  expect_invariant(data, kRanks, 6);
  std::fill(data.topk_ids.begin(), data.topk_ids.end(), 2);
  expect_invariant(data, kRanks, 6);
}

TEST_P(Bits, NoTokensAnywhere) {
  const Case data = make({.tokens = 0});
  expect_invariant(data, kRanks, 6);
  const CaseResult result = run(data, 4, {});
  EXPECT_TRUE(result.out.empty());
  for (const float value : result.d_w1) ASSERT_EQ(value, 0.0F);
  for (const float value : result.d_w2) ASSERT_EQ(value, 0.0F);
}

TEST_P(Bits, AnyPlacementOfExperts) {
  const Case data = make({.tokens = 41, .experts = 7, .topk = 3});
  const CaseResult expected = run_case_sequential(data, true);
  with_storage(data, [&]<typename S>(S) {
    for (const std::vector<std::int32_t>& map :
         {std::vector<std::int32_t>{3, 0, 3, 1, 0, 3, 1}, {2, 2, 2, 2, 2, 2, 2}}) {
      for (std::uint64_t i = 0; i < 6; ++i) {
        Ranks<S> ranks(data, {.num_ranks = 4,
                              .schedule = sample_schedule(4, i),
                              .placement = make_placement(map, 4)});
        Step<S> step(data, ranks.placement());
        expect_equal(data, expected, ranks.forward_backward(step),
                     to_string(sample_schedule(4, i)));
      }
    }
  });
}

TEST_P(Bits, RepeatsGiveTheSameBits) {
  const Case data = make({.tokens = 60}, "zipf:1.2");
  const CaseResult expected = run_case_sequential(data, true);
  for (std::uint64_t i = 0; i < 8; ++i) {
    const Schedule schedule = sample_schedule(9, i);
    expect_equal(data, expected, run(data, 4, schedule, 10), to_string(schedule));
  }
}

struct Width {
  std::int64_t hidden, ffn;
};
class Widths : public ::testing::TestWithParam<Width> {};

INSTANTIATE_TEST_SUITE_P(Odd, Widths,
                         ::testing::Values(Width{72, 776}, Width{776, 72}, Width{1416, 72},
                                           Width{72, 1416}, Width{2056, 72}, Width{72, 2056},
                                           Width{2880, 72}, Width{72, 2880}, Width{8, 8},
                                           Width{64, 48}, Width{136, 200}),
                         [](const auto& test) {
                           return fmt::format("H{}F{}", test.param.hidden, test.param.ffn);
                         });

TEST_P(Widths, GiveEqualBits) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    expect_invariant(random_case({.tokens = 5,
                                  .hidden = GetParam().hidden,
                                  .ffn = GetParam().ffn,
                                  .experts = 4,
                                  .topk = 2},
                                 dtype),
                     {1, 2, 4}, 3);
  }
}

}  // namespace
}  // namespace uniep::test
