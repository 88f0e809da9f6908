// SPDX-License-Identifier: Apache-2.0
// NaN and infinity are data: they reach the rows and experts they touch, no other, and stop nobody.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <vector>

#include "layer_support.hpp"

namespace uniep::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename S>
S store(float value) {
  return cpu::narrow<S>(value);
}

template <typename S>
std::vector<float> floats(std::span<const S> values) {
  std::vector<float> wide;
  for (const S value : values) wide.push_back(cpu::widen(value));
  return wide;
}

// What a fault may reach.
struct Reach {
  std::set<std::int64_t> out_tokens, d_x_tokens, d_weight_tokens;
  std::set<std::int64_t> d_w1_experts, d_w2_experts;
};

// Blocks of `width` elements whose index is not in `touched` must have the bits of the clean run.
void expect_clean(const std::vector<float>& clean, const std::vector<float>& got,
                  std::int64_t width, const std::set<std::int64_t>& touched, const char* name) {
  ASSERT_EQ(clean.size(), got.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (touched.contains(static_cast<std::int64_t>(i) / width)) continue;
    ASSERT_EQ(std::memcmp(&clean[i], &got[i], sizeof(float)), 0)
        << name << " element " << i << " is " << got[i] << " instead of " << clean[i];
  }
}

// Every block in `touched` has a value that is not finite: the fault did arrive.
void expect_arrived(const std::vector<float>& got, std::int64_t width,
                    const std::set<std::int64_t>& touched, const char* name) {
  for (const std::int64_t block : touched) {
    bool found = false;
    for (std::int64_t i = block * width; i < (block + 1) * width; ++i) {
      found = found || !std::isfinite(got[at(i)]);
    }
    EXPECT_TRUE(found) << name << " block " << block << " is finite";
  }
}

template <typename S>
void expect_isolated(const Case& clean, const Case& faulty, const Reach& reach) {
  const CaseResult before = run_case_sequential(clean, true);
  const CaseResult expected = run_case_sequential(faulty, true);
  for (const int num_ranks : {1, 2, 4}) {
    for (std::uint64_t i = 0; i < 4; ++i) {
      const Schedule schedule = sample_schedule(13, i);
      const CaseResult got = run(faulty, num_ranks, schedule);
      expect_equal(faulty, expected, got, to_string(schedule));
    }
  }
  const std::int64_t w = clean.hidden * clean.ffn;
  const auto check = [](const std::vector<float>& a, const std::vector<float>& b,
                        std::int64_t width, const std::set<std::int64_t>& touched,
                        const char* name) {
    expect_clean(a, b, width, touched, name);
    expect_arrived(b, width, touched, name);
  };
  check(floats(values_of<S>(before.out)), floats(values_of<S>(expected.out)), clean.hidden,
        reach.out_tokens, "out");
  check(floats(values_of<S>(before.d_x)), floats(values_of<S>(expected.d_x)), clean.hidden,
        reach.d_x_tokens, "d_x");
  check(before.d_topk_weights, expected.d_topk_weights, clean.topk, reach.d_weight_tokens,
        "d_topk_weights");
  check(before.d_w1, expected.d_w1, 2 * w, reach.d_w1_experts, "d_w1");
  check(before.d_w2, expected.d_w2, w, reach.d_w2_experts, "d_w2");
}

std::set<std::int64_t> experts_of(const Case& data, std::int64_t token) {
  std::set<std::int64_t> experts;
  for (std::int64_t c = 0; c < data.topk; ++c) {
    const std::int32_t id = data.topk_ids[at(token * data.topk + c)];
    if (id >= 0) experts.insert(id);
  }
  return experts;
}

std::set<std::int64_t> tokens_of(const Case& data, std::int32_t expert) {
  std::set<std::int64_t> tokens;
  for (std::int64_t t = 0; t < data.num_tokens; ++t) {
    if (experts_of(data, t).contains(expert)) tokens.insert(t);
  }
  return tokens;
}

class NonFinite : public ::testing::TestWithParam<DType> {
 protected:
  Case clean_ = random_case({.tokens = 40, .experts = 10, .topk = 2}, GetParam());
  static constexpr std::int64_t kToken = 17;
};

INSTANTIATE_TEST_SUITE_P(Dtypes, NonFinite, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

TEST_P(NonFinite, InputReachesItsTokenAndItsExperts) {
  const auto experts = experts_of(clean_, kToken);
  with_storage(clean_, [&]<typename S>(S) {
    for (const float value : {kNan, kInfinity, -kInfinity}) {
      Case faulty = clean_;
      values_of<S>(faulty.x)[at(kToken * clean_.hidden + 3)] = store<S>(value);
      expect_isolated<S>(clean_, faulty,
                         {.out_tokens = {kToken},
                          .d_x_tokens = {kToken},
                          .d_weight_tokens = {kToken},
                          .d_w1_experts = experts,
                          .d_w2_experts = experts});
    }
  });
}

TEST_P(NonFinite, OutputGradientReachesNoOutput) {
  const auto experts = experts_of(clean_, kToken);
  with_storage(clean_, [&]<typename S>(S) {
    Case faulty = clean_;
    values_of<S>(*faulty.d_out)[at(kToken * clean_.hidden)] = store<S>(kNan);
    expect_isolated<S>(clean_, faulty,
                       {.out_tokens = {},
                        .d_x_tokens = {kToken},
                        .d_weight_tokens = {kToken},
                        .d_w1_experts = experts,
                        .d_w2_experts = experts});
  });
}

TEST_P(NonFinite, WeightOfAChoiceReachesItsToken) {
  const std::int32_t expert = clean_.topk_ids[at(kToken * clean_.topk)];
  with_storage(clean_, [&]<typename S>(S) {
    Case faulty = clean_;
    faulty.topk_weights[at(kToken * clean_.topk)] = kNan;
    expect_isolated<S>(clean_, faulty,
                       {.out_tokens = {kToken},
                        .d_x_tokens = {kToken},
                        .d_weight_tokens = {},
                        .d_w1_experts = {expert},
                        .d_w2_experts = {expert}});
  });
}

TEST_P(NonFinite, ExpertWeightsReachTheTokensThatChoseThem) {
  constexpr std::int32_t kExpert = 4;
  const auto tokens = tokens_of(clean_, kExpert);
  ASSERT_FALSE(tokens.empty());
  with_storage(clean_, [&]<typename S>(S) {
    Case faulty = clean_;
    const std::int64_t w = clean_.hidden * clean_.ffn;
    values_of<S>(faulty.w1)[at(kExpert * 2 * w + 5)] = store<S>(kNan);
    expect_isolated<S>(clean_, faulty,
                       {.out_tokens = tokens,
                        .d_x_tokens = tokens,
                        .d_weight_tokens = tokens,
                        .d_w1_experts = {kExpert},
                        .d_w2_experts = {kExpert}});
    faulty = clean_;
    values_of<S>(faulty.w2)[at(kExpert * w + 5)] = store<S>(kNan);
    expect_isolated<S>(clean_, faulty,
                       {.out_tokens = tokens,
                        .d_x_tokens = tokens,
                        .d_weight_tokens = tokens,
                        .d_w1_experts = {kExpert},
                        .d_w2_experts = {}});
  });
}

TEST_P(NonFinite, EverywhereStillEnds) {
  with_storage(clean_, [&]<typename S>(S) {
    Case faulty = clean_;
    for (S& value : values_of<S>(faulty.x)) value = store<S>(kNan);
    for (S& value : values_of<S>(faulty.w2)) value = store<S>(-kInfinity);
    for (S& value : values_of<S>(*faulty.d_out)) value = store<S>(kInfinity);
    for (float& value : faulty.topk_weights) value = kNan;
    expect_invariant(faulty, {1, 2, 4, 8}, 4);
  });
}

}  // namespace
}  // namespace uniep::test
