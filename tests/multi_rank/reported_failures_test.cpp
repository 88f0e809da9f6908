// SPDX-License-Identifier: Apache-2.0
// Inputs that broke systems of this kind, and their neighbours: docs/design/triggers.md has the
// list with the public reports. The judge is always sequential execution, bit for bit; outputs are
// filled with NaN before every call and fenced.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "base/memory.hpp"
#include "base/rng.hpp"
#include "layer_support.hpp"
#include "layout/heap_layout.hpp"

namespace uniep::test {
namespace {

// Before some tasks a pause of random length: rows arrive in another order each time.
class Delays {
 public:
  void operator()(const TaskInfo& task) {
    Rng rng(count_.fetch_add(1), static_cast<std::uint64_t>(task.rank * 64 + task.worker));
    const std::uint64_t draw = rng.below(16);
    if (draw < 4) std::this_thread::yield();
    if (draw == 4) std::this_thread::sleep_for(std::chrono::microseconds(rng.below(200)));
  }

 private:
  std::atomic<std::uint64_t> count_{0};
};

std::vector<std::int32_t> repeated(const std::vector<std::int64_t>& rows_of_expert) {
  std::vector<std::int32_t> ids;
  for (std::size_t e = 0; e < rows_of_expert.size(); ++e) {
    ids.insert(ids.end(), at(rows_of_expert[e]), static_cast<std::int32_t>(e));
  }
  return ids;
}

template <typename T>
void shuffle(std::vector<T>& values, Rng& rng) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[rng.below(i)]);
}

template <typename S>
void expect_step(Ranks<S>& ranks, const Case& data, const std::string& what) {
  Step<S> step(data, ranks.placement());
  expect_equal(data, run_case_sequential(data, true), ranks.forward_backward(step), what);
}

// --- where rows lie ---

// Everything that a rank received or kept, not only what a caller sees.
template <typename S>
std::vector<std::byte> everything_moved(Ranks<S>& ranks, Step<S>& step) {
  std::vector<std::byte> all;
  const auto append = [&all](const void* from, std::size_t bytes) {
    const auto* first = static_cast<const std::byte*>(from);
    all.insert(all.end(), first, first + bytes);
  };
  for (int rank = 0; rank < ranks.num_ranks(); ++rank) {
    for (const Region region : {Region::recv_rows, Region::staging, Region::d_weight_staging}) {
      append(ranks.group().template region<std::byte>(rank, region),
             at(ranks.group().layout().bytes(region)));
    }
    const cpu::Saved<S>& saved = step.saved(rank);
    append(saved.x_rows.data(), saved.x_rows.size() * sizeof(S));
    append(saved.h.data(), saved.h.size() * sizeof(S));
    append(saved.weights.data(), saved.weights.size() * sizeof(float));
    append(saved.origins.data(), saved.origins.size() * sizeof(cpu::RowOrigin));
  }
  return all;
}

TEST(Arrival, RowsLieInTheSamePlacesWhateverIsLate) {
  const Case data = random_case({.tokens = 40, .hidden = 24, .ffn = 40}, DType::bf16, "zipf:1.2");
  const CaseResult expected = run_case_sequential(data, true);
  for (const char* text : {"workers=3,chunk=3,tile_m=8", "workers=2,payload=choice,chunk=1",
                           "workers=2,direction=pull,tile_m=8", "workers=3,comm_workers=1,chunk=1",
                           "workers=2,direction=pull,payload=choice,fusion=split"}) {
    auto delays = std::make_shared<Delays>();
    Ranks<Bf16> ranks(data, {.num_ranks = 3,
                             .schedule = parse_schedule(text),
                             .before_task = [delays](const TaskInfo& task) { (*delays)(task); }});
    Step<Bf16> step(data, ranks.placement());
    std::vector<std::byte> first;
    for (int round = 0; round < 50; ++round) {
      expect_equal(data, expected, ranks.forward_backward(step), text);
      const std::vector<std::byte> moved = everything_moved(ranks, step);
      if (round == 0) first = moved;
      ASSERT_TRUE(moved == first) << "round " << round << ", " << text;
    }
  }
}

// --- order of calls ---

// One order of forwards and backwards of three micro-batches of different sizes on one group, the
// weight gradients added up; `order` is "F0 F1 B0 …".
void expect_order(const std::string& order, const Schedule& schedule, int repeats) {
  SCOPED_TRACE(order + ", " + to_string(schedule));
  constexpr int kRanksOfGroup = 3;
  std::vector<Case> batches;
  for (const std::int64_t tokens : {31, 45, 8}) {
    batches.push_back(random_case({.tokens = tokens, .hidden = 16, .ffn = 24, .topk = 3},
                                  DType::bf16, "zipf:1.2", 1, 0.1,
                                  static_cast<std::uint64_t>(tokens)));
  }
  std::vector<CaseResult> expected;
  for (const Case& batch : batches) expected.push_back(run_case_sequential(batch, true));
  std::vector<float> sum_w1(expected[0].d_w1.size()), sum_w2(expected[0].d_w2.size());
  for (std::size_t i = 0; i < order.size(); i += 3) {
    if (order[i] != 'B') continue;
    const CaseResult& one = expected[at(order[i + 1] - '0')];
    for (std::size_t j = 0; j < sum_w1.size(); ++j) sum_w1[j] += one.d_w1[j];
    for (std::size_t j = 0; j < sum_w2.size(); ++j) sum_w2[j] += one.d_w2[j];
  }
  Ranks<Bf16> ranks(batches[1], {.num_ranks = kRanksOfGroup, .schedule = schedule});
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::vector<std::unique_ptr<Step<Bf16>>> steps;
    for (const Case& batch : batches) {
      steps.push_back(std::make_unique<Step<Bf16>>(batch, ranks.placement()));
    }
    std::vector<float> d_w1(sum_w1.size()), d_w2(sum_w2.size());
    ranks.all([&](cpu::RankLayer<Bf16>& layer, int rank) {
      const auto& experts = ranks.placement().experts_of[at(rank)];
      const std::size_t w = at(batches[0].hidden * batches[0].ffn);
      const std::size_t first = static_cast<std::size_t>(experts.front()) * w;
      for (std::size_t i = 0; i < order.size(); i += 3) {
        Step<Bf16>& step = *steps[at(order[i + 1] - '0')];
        if (order[i] == 'F') {
          step.forward(layer, rank);
          continue;
        }
        auto input = step.backward_input(rank);
        input.accumulate = true;
        input.d_w1 = std::span(d_w1).subspan(2 * first, 2 * w * experts.size());
        input.d_w2 = std::span(d_w2).subspan(first, w * experts.size());
        layer.backward(step.saved(rank), input);
      }
    });
    for (std::size_t batch = 0; batch < batches.size(); ++batch) {
      const CaseResult got = steps[batch]->result();
      ASSERT_EQ(got.out, expected[batch].out) << "batch " << batch << ", repeat " << repeat;
      ASSERT_EQ(got.d_x, expected[batch].d_x) << "batch " << batch << ", repeat " << repeat;
      ASSERT_EQ(got.d_topk_weights, expected[batch].d_topk_weights);
    }
    ASSERT_EQ(d_w1, sum_w1) << "repeat " << repeat;
    ASSERT_EQ(d_w2, sum_w2) << "repeat " << repeat;
  }
}

TEST(MicroBatches, InAnyOrderKeepTheirBits) {
  for (std::uint64_t i = 0; i < 5; ++i) {
    const Schedule schedule = i == 0 ? Schedule{} : sample_schedule(21, i);
    expect_order("F0 F1 B0 F2 B1 B2", schedule, 20);
    expect_order("F0 F1 F2 B2 B1 B0", schedule, 3);
    expect_order("F0 F1 B0 B1 F2 B2", schedule, 3);
    expect_order("F2 F0 F0 F1 B1 B0 B2", schedule, 3);
    if (HasFailure()) return;
  }
}

// --- shapes ---

// Every pairing of choices with local experts, exact in each of 20 repeats.
TEST(Shapes, ChoicesByLocalExpertsRepeatExactly) {
  for (const int topk : {1, 2, 3, 5, 6, 7, 8, 10}) {
    for (const int local : {1, 2, 3, 5, 16, 20}) {
      SCOPED_TRACE(fmt::format("k {} and {} local experts", topk, local));
      const DType dtype = (topk + local) % 2 == 0 ? DType::bf16 : DType::f32;
      const Case data = random_case(
          {.tokens = 19, .hidden = 16, .ffn = 24, .experts = 2 * local, .topk = topk}, dtype);
      const CaseResult expected = run_case_sequential(data, true);
      with_storage(data, [&]<typename S>(S) {
        const auto point = static_cast<std::uint64_t>(topk * 100 + local);
        Ranks<S> ranks(data, {.num_ranks = 2, .schedule = sample_schedule(22, point)});
        Step<S> step(data, ranks.placement());
        for (int repeat = 0; repeat < 20; ++repeat) {
          expect_equal(data, expected, ranks.forward_backward(step), fmt::format("{}", repeat));
        }
      });
      if (HasFailure()) return;
    }
  }
}

TEST(Shapes, ManyChoices) {
  for (const int topk : {32, 33, 63, 64}) {
    const Case data = random_case({.tokens = 5, .experts = 70, .topk = topk}, DType::bf16);
    expect_invariant(data, {1, 3}, 4);
  }
  const Case data = random_case({.tokens = 5}, DType::f32);
  cpu::GroupConfig config;
  config.shape = {.num_ranks = 1, .num_experts = 8, .topk = 65, .hidden = 8, .max_tokens = 5};
  config.placement = make_contiguous_placement(8, 1);
  try {
    const cpu::Group group(config);
    FAIL() << "65 choices were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "topk is 65; it must be 1 to 64");
  }
}

// Files hold widths that are multiples of 8; the layer takes any.
Case with_widths(Case data, std::int64_t hidden, std::int64_t ffn) {
  const std::size_t element = at(dtype_bytes(data.dtype));
  data.hidden = hidden;
  data.ffn = ffn;
  data.x.resize(at(data.num_tokens * hidden) * element);
  data.d_out->resize(data.x.size());
  data.w1.resize(at(data.num_experts * 2 * ffn * hidden) * element);
  data.w2.resize(at(data.num_experts * ffn * hidden) * element);
  return data;
}

TEST(Shapes, WidthsOfOneAndOddOnes) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case base = random_case({.tokens = 9, .hidden = 72, .ffn = 72, .experts = 3}, dtype);
    for (const std::int64_t hidden : {1, 2, 3, 7, 17, 63, 65}) {
      for (const std::int64_t ffn : {1, 5, 64, 67}) {
        expect_invariant(with_widths(base, hidden, ffn), {1, 2}, 2);
      }
    }
  }
}

// Each number of rows up to two tiles and around multiples of a tile beyond, three times: no row
// at the end is left out, and no number has another order of additions. T mod 128 takes all values.
TEST(Shapes, EveryNumberOfTokens) {
  std::vector<std::int64_t> counts(258);
  std::iota(counts.begin(), counts.end(), 0);
  for (const std::int64_t edge : {512, 1024, 2048, 4096}) {
    for (std::int64_t d = -1; d <= 1; ++d) counts.push_back(edge + d);
  }
  const Case most =
      random_case({.tokens = 4097, .hidden = 16, .ffn = 8, .experts = 1, .topk = 1}, DType::bf16);
  Ranks<Bf16> ranks(most, {.num_ranks = 2, .schedule = parse_schedule("workers=2")});
  for (const std::int64_t tokens : counts) {
    const Case data = random_case(
        {.tokens = tokens, .hidden = 16, .ffn = 8, .experts = 1, .topk = 1}, DType::bf16);
    const CaseResult expected = run_case_sequential(data, true);
    Step<Bf16> step(data, ranks.placement());
    for (int repeat = 0; repeat < 3; ++repeat) {
      expect_equal(data, expected, ranks.forward_backward(step), fmt::format("{}", tokens));
    }
    ASSERT_FALSE(HasFailure()) << tokens << " tokens";
  }
}

TEST(Shapes, MoreThanTwoToTheTwentyChoices) {
  // Counters of 16 bits would wrap at 65,536 rows, floats would stop counting at 2^24.
  for (const std::int64_t tokens : {65537, (1 << 20) + 1}) {
    const Case data =
        with_widths(random_case({.tokens = tokens, .hidden = 8, .ffn = 8, .experts = 3, .topk = 1},
                                DType::f32, "zipf:2"),
                    1, 1);
    const CaseResult expected = run_case_sequential(data, true);
    for (const int num_ranks : {1, 2}) {
      expect_equal(data, expected, run(data, num_ranks, parse_schedule("tile_m=512,chunk=4096")),
                   fmt::format("{} tokens, {} ranks", tokens, num_ranks));
    }
  }
}

// Staging and receive regions of more than 2^31 elements, of which almost all belong to masked
// choices and so are never touched: the rows in use lie beyond what 32 bits can index.
TEST(Shapes, RowsBeyondTwoToTheThirtyOneElements) {
  constexpr std::int64_t kTokens = 4100, kHidden = 8192;
  constexpr int kTopk = 64;
  static_assert(kTokens * kTopk * kHidden > std::int64_t{1} << 31);
  // Little of it is ever touched, but a group refuses what would not fit.
  if (available_bytes() < 10'000'000'000U) GTEST_SKIP() << "needs 10 GB of available memory";
  // The tokens that have a choice, and the same among thousands that have none.
  constexpr std::array<std::int64_t, 4> kPlaces{0, 2049, kTokens - 2, kTokens - 1};
  Case few = random_case({.tokens = 4, .hidden = kHidden, .ffn = 8, .experts = 2}, DType::bf16);
  few.topk = kTopk;
  few.topk_ids.assign(4 * kTopk, -1);
  few.topk_weights.assign(4 * kTopk, 0.5F);
  for (const std::size_t choice : {3U, 127U, 128U, 190U, 255U}) {
    few.topk_ids[choice] = static_cast<std::int32_t>(choice % 2);
  }
  const CaseResult expected_few = run_case_sequential(few, true);
  const auto spread = [&](const auto& values, std::int64_t width, const auto& filler) {
    std::remove_cvref_t<decltype(values)> all(at(kTokens * width), filler);
    for (std::size_t i = 0; i < kPlaces.size(); ++i) {
      std::copy_n(values.data() + i * at(width), width, all.data() + kPlaces[i] * width);
    }
    return all;
  };
  constexpr std::int64_t kRowBytes = 2 * kHidden;
  Case data = few;
  data.num_tokens = kTokens;
  data.tokens_per_rank.clear();
  data.x = spread(few.x, kRowBytes, std::byte{0});
  data.d_out = spread(*few.d_out, kRowBytes, std::byte{0});
  data.topk_ids = spread(few.topk_ids, kTopk, -1);
  data.topk_weights = spread(few.topk_weights, kTopk, 0.0F);
  CaseResult expected = expected_few;
  expected.out = spread(expected_few.out, kRowBytes, std::byte{0});
  expected.d_x = spread(expected_few.d_x, kRowBytes, std::byte{0});
  expected.d_topk_weights = spread(expected_few.d_topk_weights, kTopk, 0.0F);
  for (const char* text : {"payload=choice,chunk=4096", "direction=pull,chunk=4096"}) {
    expect_equal(data, expected, run(data, 1, parse_schedule(text)), text);
  }
}

// Weight gradients are one chain over all rows of an expert: few experts, many rows.
TEST(Shapes, WeightGradientsOfManyRowsAreOneChain) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case data =
        random_case({.tokens = 3000, .hidden = 24, .ffn = 16, .experts = 2, .topk = 2}, dtype);
    expect_invariant(data, {1, 2, 3}, 4);
  }
}

// --- who gets how many rows ---

TEST(Rows, OneTokenBesideThousands) {
  for (const std::int64_t few : {0, 1}) {
    Case data = random_case({.tokens = 8192 + few, .hidden = 8, .ffn = 8}, DType::bf16);
    for (const bool first : {true, false}) {
      data.tokens_per_rank =
          first ? std::vector<std::int64_t>{few, 8192} : std::vector<std::int64_t>{8192, few};
      expect_invariant(data, {2}, 3);
    }
  }
}

// Random sets of experts that nobody chose; the first draws leave out the first, the last, all but
// one and all.
void expect_empty_experts(int draws) {
  constexpr int kExperts = 6;
  constexpr int kGroups = 4;
  const Case base = random_case({.tokens = 12, .hidden = 8, .ffn = 16, .experts = kExperts},
                                DType::bf16, "W0", 1, 0.1);
  for (int group = 0; group < kGroups; ++group) {
    Ranks<Bf16> ranks(base, {.num_ranks = 1 + group,
                             .schedule = sample_schedule(23, static_cast<std::uint64_t>(group))});
    for (int draw = 0; draw < draws / kGroups; ++draw) {
      Rng rng(static_cast<std::uint64_t>(draw), static_cast<std::uint64_t>(group));
      std::uint64_t used = rng.below(1U << kExperts);
      if (draw == 0) used = 0b111110;
      if (draw == 1) used = 0b011111;
      if (draw >= 2 && draw < 2 + kExperts) used = std::uint64_t{1} << (draw - 2);
      if (draw == 2 + kExperts) used = 0;
      Case data = base;
      for (std::int32_t& id : data.topk_ids) {
        if (id < 0) continue;
        id = static_cast<std::int32_t>(rng.below(kExperts));
        for (int i = 0; i < kExperts && (used >> id & 1) == 0; ++i) id = (id + 1) % kExperts;
        if ((used >> id & 1) == 0) id = -1;
      }
      expect_step(ranks, data,
                  fmt::format("draw {} of {} ranks, used {:b}", draw, group + 1, used));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Rows, OfAThousandDrawsOfEmptyExperts) { expect_empty_experts(1000); }

TEST(Rows, PerExpertAroundTilesOf64) {
  const std::vector<std::int64_t> counts{0, 1, 63, 64, 65, 127, 128, 129};
  for (int draw = 0; draw < 24; ++draw) {
    Rng rng(static_cast<std::uint64_t>(draw), 24);
    std::vector<std::int64_t> rows = counts;
    if (draw >= 8) {
      for (std::int64_t& r : rows) r = counts[rng.below(counts.size())];
    }
    shuffle(rows, rng);
    std::vector<std::int32_t> ids = repeated(rows);
    shuffle(ids, rng);
    Case data = random_case({.tokens = static_cast<std::int64_t>(ids.size()),
                             .hidden = 16,
                             .ffn = 72,
                             .experts = 8,
                             .topk = 1},
                            draw % 2 == 0 ? DType::bf16 : DType::f32);
    data.topk_ids = ids;
    expect_invariant(data, {1 + draw % 4}, 2, static_cast<std::uint64_t>(draw));
    ASSERT_FALSE(HasFailure()) << fmt::format("rows {}", fmt::join(rows, ","));
  }
}

// Exactly one tile of rows an expert, over and over.
void expect_full_tiles(int calls) {
  Case data =
      random_case({.tokens = 512, .hidden = 16, .ffn = 16, .experts = 4, .topk = 1}, DType::bf16);
  data.topk_ids = repeated({128, 128, 128, 128});
  Rng rng(25);
  shuffle(data.topk_ids, rng);
  const CaseResult expected = run_case_sequential(data, true);
  for (const char* text : {"tile_m=128,workers=2", "tile_m=64,workers=2,direction=pull"}) {
    Ranks<Bf16> ranks(data, {.num_ranks = 2, .schedule = parse_schedule(text)});
    Step<Bf16> step(data, ranks.placement());
    for (int call = 0; call < calls; ++call) {
      expect_equal(data, expected, ranks.forward_backward(step), fmt::format("call {}", call));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Rows, OfExactlyOneTileAnExpert) { expect_full_tiles(100); }

// Every rank in turn is left without rows, and in turn gets all of them.
TEST(Rows, NoneForOneRankOrAllForIt) {
  constexpr int kRanksOfGroup = 4, kExperts = 8;
  const Case base = random_case({.tokens = 40, .experts = kExperts, .topk = 3}, DType::bf16);
  const Placement placement = make_contiguous_placement(kExperts, kRanksOfGroup);
  for (std::uint64_t i = 0; i < 4; ++i) {
    Ranks<Bf16> ranks(base, {.num_ranks = kRanksOfGroup, .schedule = sample_schedule(26, i)});
    for (int victim = 0; victim < kRanksOfGroup; ++victim) {
      for (const bool all : {false, true}) {
        SCOPED_TRACE(fmt::format("{} rows for rank {}", all ? "all" : "no", victim));
        Case data = base;
        for (std::int32_t& id : data.topk_ids) {
          const bool his = placement.rank_of[at(id)] == victim;
          if (his != all) id = all ? victim * 2 + id % 2 : (id + 2) % kExperts;
        }
        Step<Bf16> step(data, ranks.placement());
        const CaseResult result = ranks.forward_backward(step);
        expect_equal(data, run_case_sequential(data, true), result, "");
        // Exact zeros, and main_grad is not touched.
        ranks.all([&](cpu::RankLayer<Bf16>& layer, int rank) {
          auto input = step.backward_input(rank);
          const bool starved = all != (rank == victim);
          if (starved) {
            for (const float value : input.d_w1) ASSERT_EQ(value, 0.0F);
            for (const float value : input.d_w2) ASSERT_EQ(value, 0.0F);
          }
          for (float& value : input.d_w1) value = -0.0F;
          for (float& value : input.d_w2) value = -0.0F;
          input.accumulate = true;
          layer.backward(step.saved(rank), input);
          if (!starved) return;
          for (const float value : input.d_w1) ASSERT_TRUE(std::signbit(value));
          for (const float value : input.d_w2) ASSERT_TRUE(std::signbit(value));
        });
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Rows, OfFiveHundredDrawsOfTokensPerRank) {
  constexpr int kRanksOfGroup = 4;
  const Case most = random_case({.tokens = 4 * 13, .hidden = 8, .ffn = 8}, DType::f32);
  for (std::uint64_t i = 0; i < 5; ++i) {
    Ranks<float> ranks(most, {.num_ranks = kRanksOfGroup, .schedule = sample_schedule(27, i)});
    for (std::uint64_t draw = 0; draw < 100; ++draw) {
      Rng rng(draw, i);
      std::vector<std::int64_t> tokens(kRanksOfGroup);
      for (std::int64_t& t : tokens) {
        t = rng.below(4) == 0 ? 0 : static_cast<std::int64_t>(rng.below(14));
      }
      Case data =
          random_case({.tokens = std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}),
                       .hidden = 8,
                       .ffn = 8},
                      DType::f32, "W0", 1, 0.1, draw + 1);
      data.tokens_per_rank = tokens;
      expect_step(ranks, data, fmt::format("tokens {}", fmt::join(tokens, ",")));
      if (HasFailure()) return;
    }
  }
}

// --- groups ---

// Four threads; two disjoint groups of ranks that are not neighbours, and one of all four, used in
// turn by the same threads: nothing is shared by the process.
TEST(Groups, OfTheSameThreadsTakeTurns) {
  const Case small = random_case({.tokens = 21, .hidden = 16, .ffn = 24}, DType::bf16);
  const Case other = random_case({.tokens = 13, .hidden = 8, .ffn = 16, .experts = 3, .topk = 1},
                                 DType::bf16, "W0", 1, 0, 9);
  const Case large =
      random_case({.tokens = 30, .hidden = 24, .ffn = 8, .experts = 10}, DType::bf16);
  Ranks<Bf16> even(small, {.num_ranks = 2, .schedule = parse_schedule("workers=2")});
  Ranks<Bf16> odd(other, {.num_ranks = 2, .schedule = parse_schedule("direction=pull")});
  Ranks<Bf16> all(large, {.num_ranks = 4, .schedule = parse_schedule("payload=choice")});
  Step<Bf16> even_step(small, even.placement()), odd_step(other, odd.placement()),
      all_step(large, all.placement());
  const CaseResult expected_even = run_case_sequential(small, true);
  const CaseResult expected_odd = run_case_sequential(other, true);
  const CaseResult expected_all = run_case_sequential(large, true);
  for (int round = 0; round < 30; ++round) {
    all.all([&](cpu::RankLayer<Bf16>& layer, int thread) {
      Ranks<Bf16>& half = thread % 2 == 0 ? even : odd;
      Step<Bf16>& half_step = thread % 2 == 0 ? even_step : odd_step;
      half_step.forward(half.layer(thread / 2), thread / 2);
      all_step.forward(layer, thread);
      half_step.backward(half.layer(thread / 2), thread / 2);
      all_step.backward(layer, thread);
    });
    expect_equal(small, expected_even, even_step.result(), "ranks 0 and 2");
    expect_equal(other, expected_odd, odd_step.result(), "ranks 1 and 3");
    expect_equal(large, expected_all, all_step.result(), "all four");
    ASSERT_FALSE(HasFailure()) << "round " << round;
  }
}

// --- reuse ---

// Routing changes at every operation and so do sizes; what earlier operations left behind in the
// heap must not show. Outputs are poisoned by Step.
void expect_reuse(int iterations, const Schedule& schedule) {
  constexpr int kRanksOfGroup = 4;
  const std::array<const char*, 6> routings{"W0", "W1", "W2", "one-hot", "empty-ranks", "W6"};
  const Case most = random_case({.tokens = 64, .hidden = 8, .ffn = 8}, DType::bf16);
  Ranks<Bf16> ranks(most, {.num_ranks = kRanksOfGroup, .schedule = schedule});
  for (int i = 0; i < iterations; ++i) {
    Rng rng(static_cast<std::uint64_t>(i), 28);
    const Case data =
        random_case({.tokens = static_cast<std::int64_t>(rng.below(65)), .hidden = 8, .ffn = 8},
                    DType::bf16, routings[rng.below(routings.size())], kRanksOfGroup,
                    rng.below(3) == 0 ? 0.4 : 0, static_cast<std::uint64_t>(i) + 1);
    if (i % 3 == 0) {
      // As if an earlier operation had left NaN everywhere.
      for (int rank = 0; rank < kRanksOfGroup; ++rank) {
        for (const Region region : {Region::send_rows, Region::recv_rows, Region::staging,
                                    Region::d_weight_staging, Region::topk_weights}) {
          std::memset(ranks.group().region<std::byte>(rank, region), 0xFF,
                      at(ranks.group().layout().bytes(region)));
        }
      }
    }
    expect_step(ranks, data, fmt::format("iteration {}", i));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Reuse, OfOneHeapUnderChangingRoutings) {
  for (std::uint64_t i = 0; i < 5; ++i) expect_reuse(100, sample_schedule(29, i));
}

TEST(Reuse, FiveHundredForwardsAndBackwards) {
  const Case data = random_case({.tokens = 16, .hidden = 8, .ffn = 8}, DType::bf16);
  const CaseResult expected = run_case_sequential(data, true);
  Ranks<Bf16> ranks(data, {.num_ranks = 4, .schedule = parse_schedule("workers=2")});
  Step<Bf16> step(data, ranks.placement());
  for (int i = 0; i < 500; ++i) {
    expect_equal(data, expected, ranks.forward_backward(step), fmt::format("call {}", i));
    ASSERT_FALSE(HasFailure());
  }
}

// Counters that start near a power of two and cross it, as after years of operations.
TEST(Reuse, CountersCrossPowersOfTwo) {
  const Case data = random_case({.tokens = 16, .hidden = 8, .ffn = 8}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  for (const char* text : {"workers=2", "direction=pull,payload=choice", "fusion=split"}) {
    Ranks<float> ranks(data, {.num_ranks = 3, .schedule = parse_schedule(text)});
    Step<float> step(data, ranks.placement());
    for (const int bits : {8, 15, 16, 24, 31, 32, 33, 63}) {
      for (int rank = 0; rank < 3; ++rank) {
        cpu::RankEpochs& epochs = ranks.group().epochs(rank);
        epochs.current = (std::uint64_t{1} << bits) - 4;
        epochs.first = epochs.current + 1;
      }
      for (int i = 0; i < 4; ++i) {
        expect_equal(data, expected, ranks.forward_backward(step),
                     fmt::format("2^{}, call {}, {}", bits, i, text));
      }
      ASSERT_FALSE(HasFailure());
    }
  }
}

// --- long versions of the above, for make nightly ---

TEST(Soak, DISABLED_ReuseForTenThousandIterations) {
  for (std::uint64_t i = 0; i < 5; ++i) expect_reuse(2000, sample_schedule(30, i));
}
TEST(Soak, DISABLED_FullTilesForTenThousandCalls) { expect_full_tiles(5000); }
TEST(Soak, DISABLED_TwentyThousandDrawsOfEmptyExperts) { expect_empty_experts(20000); }

}  // namespace
}  // namespace uniep::test
