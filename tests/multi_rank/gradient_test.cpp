// SPDX-License-Identifier: Apache-2.0
// What the layer computes, against f64 written here from the definition alone, against finite
// differences, and the accumulation into gradients that already exist.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "cpu/sequential.hpp"
#include "layer_support.hpp"

namespace uniep::test {
namespace {

using Doubles = std::vector<double>;

Doubles wide(const Case& data, const std::vector<std::byte>& bytes) {
  Doubles values;
  with_storage(data, [&]<typename S>(S) {
    for (const S value : values_of<S>(bytes))
      values.push_back(static_cast<double>(cpu::widen(value)));
  });
  return values;
}

// The layer from its definition, token by token: out = Σ_c weight · W2 (silu(G x) ⊙ U x), and its
// derivatives by the chain rule. Nothing is rounded, ordered or tiled.
ReferenceResult from_definition(const Case& data) {
  const std::size_t hidden = at(data.hidden), ffn = at(data.ffn), topk = at(data.topk);
  const Doubles x = wide(data, data.x), w1 = wide(data, data.w1), w2 = wide(data, data.w2),
                d_out = wide(data, *data.d_out);
  ReferenceResult r;
  r.out.assign(x.size(), 0);
  r.d_x.assign(x.size(), 0);
  r.d_topk_weights.assign(data.topk_ids.size(), 0);
  r.d_w1.assign(w1.size(), 0);
  r.d_w2.assign(w2.size(), 0);
  for (std::size_t t = 0; t < at(data.num_tokens); ++t) {
    const double* in = x.data() + t * hidden;
    const double* up_grad = d_out.data() + t * hidden;
    for (std::size_t c = 0; c < topk; ++c) {
      if (data.topk_ids[t * topk + c] < 0) continue;
      const auto e = static_cast<std::size_t>(data.topk_ids[t * topk + c]);
      const auto weight = static_cast<double>(data.topk_weights[t * topk + c]);
      const double* gate_w = w1.data() + e * 2 * ffn * hidden;
      const double* up_w = gate_w + ffn * hidden;
      for (std::size_t f = 0; f < ffn; ++f) {
        double g = 0, u = 0, d_product = 0;
        for (std::size_t i = 0; i < hidden; ++i) {
          g += gate_w[f * hidden + i] * in[i];
          u += up_w[f * hidden + i] * in[i];
          d_product += up_grad[i] * w2[(e * hidden + i) * ffn + f];
        }
        const double sigma = 1 / (1 + std::exp(-g));
        const double product = g * sigma * u;
        const double d_g = weight * d_product * u * (sigma + g * sigma * (1 - sigma));
        const double d_u = weight * d_product * g * sigma;
        r.d_topk_weights[t * topk + c] += product * d_product;
        for (std::size_t i = 0; i < hidden; ++i) {
          r.out[t * hidden + i] += weight * product * w2[(e * hidden + i) * ffn + f];
          r.d_w2[(e * hidden + i) * ffn + f] += up_grad[i] * weight * product;
          r.d_x[t * hidden + i] += d_g * gate_w[f * hidden + i] + d_u * up_w[f * hidden + i];
          r.d_w1[(e * 2 * ffn + f) * hidden + i] += d_g * in[i];
          r.d_w1[(e * 2 * ffn + ffn + f) * hidden + i] += d_u * in[i];
        }
      }
    }
  }
  return r;
}

void expect_within_bounds(const Case& data, const CaseResult& got, const std::string& what) {
  const auto errors = compare_with_f64(data, got, from_definition(data));
  for (std::size_t i = 0; i < errors.size(); ++i) {
    EXPECT_LE(errors[i].relative, errors[i].bound) << kResultNames[i] << ", " << what;
  }
}

TEST(Definition, HoldsWithinTheDerivedBounds) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* routing : {"W0", "zipf:1.2", "one-hot", "empty-ranks", "W1"}) {
      const Case data = random_case({.tokens = 60, .hidden = 72, .ffn = 136, .topk = 3}, dtype,
                                    routing, 4, 0.1, 5);
      expect_within_bounds(data, run_case_sequential(data, true), routing);
      expect_within_bounds(data, run(data, 4, {}), routing);
    }
    const Case wide_case =
        random_case({.tokens = 6, .hidden = 776, .ffn = 200, .experts = 3}, dtype);
    expect_within_bounds(wide_case, run(wide_case, 2, {}), "H 776");
    const Case duplicates = random_case({.tokens = 20, .experts = 2, .topk = 5}, dtype);
    expect_within_bounds(duplicates, run(duplicates, 2, {}), "duplicate ids");
  }
}

// The bounds can be exceeded: one lost or misrouted row of 60 does.
TEST(Definition, BoundsRefuseALostAndAMisroutedRow) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case data = random_case({.tokens = 20, .hidden = 72, .ffn = 136, .topk = 3}, dtype);
    Case lost = data;
    lost.topk_ids[31] = -1;
    Case misrouted = data;
    misrouted.topk_ids[31] = (data.topk_ids[31] + 1) % 8;
    for (const Case& wrong : {lost, misrouted}) {
      const auto errors = compare_with_f64(data, run(wrong, 2, {}), from_definition(data));
      for (std::size_t i = 0; i < errors.size(); ++i) {
        EXPECT_GT(errors[i].relative, errors[i].bound) << kResultNames[i];
      }
    }
  }
}

// --- finite differences of the f64 path ---

struct Problem {
  std::int64_t tokens = 4, hidden = 8, ffn = 8;
  int experts = 3, topk = 2;
  std::vector<std::int32_t> ids{0, 1, 2, 2, 1, -1, -1, 0};  // a duplicate and masked ones
  std::vector<float> weights;
  Doubles x, w1, w2, d_out;

  [[nodiscard]] cpu::SequentialResult<double> run(bool backward) const {
    return cpu::run_sequential(cpu::SequentialInput<double>{.num_tokens = tokens,
                                                            .hidden = hidden,
                                                            .ffn = ffn,
                                                            .num_experts = experts,
                                                            .topk = topk,
                                                            .topk_ids = ids,
                                                            .topk_weights = weights,
                                                            .x = x,
                                                            .w1 = w1,
                                                            .w2 = w2,
                                                            .d_out = d_out,
                                                            .backward = backward});
  }
  // Its derivative by anything is what backward gives for d_out.
  [[nodiscard]] double loss() const {
    const auto result = run(false);
    double sum = 0;
    for (std::size_t i = 0; i < d_out.size(); ++i) sum += result.out[i] * d_out[i];
    return sum;
  }
};

Doubles uniform_values(Rng& rng, std::int64_t count) {
  Doubles values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(2 * rng.uniform01() - 1);
  return values;
}

Problem small_problem() {
  Problem p;
  Rng rng(12);
  p.x = uniform_values(rng, p.tokens * p.hidden);
  p.w1 = uniform_values(rng, p.experts * 2 * p.ffn * p.hidden);
  p.w2 = uniform_values(rng, p.experts * p.hidden * p.ffn);
  p.d_out = uniform_values(rng, p.tokens * p.hidden);
  // Multiples of 2^-8, so that a step of 2^-10 is exact in fp32.
  for (int i = 0; i < 8; ++i) p.weights.push_back(static_cast<float>(1 + rng.below(256)) * 0x1p-8F);
  return p;
}

// How far rounding alone can move loss(): every value is at most 1, so |h| <= hidden and
// |a| <= hidden^2; a rounding of h moves a by at most 2.2 |h| times as much; what remains are the
// operations on one path, each worth half a unit of the largest magnitude.
double rounding_of_loss(const Problem& p) {
  const auto hidden = static_cast<double>(p.hidden);
  const auto ffn = static_cast<double>(p.ffn);
  const auto terms = static_cast<double>(p.tokens * p.topk) * hidden * ffn;
  const double operations =
      2.2 * hidden + ffn + p.topk + static_cast<double>(p.tokens) * hidden + 8;
  return terms * hidden * hidden * operations * 0x1p-53;
}

// Central differences with steps h and h / 2. The error of the second is a third of their
// difference, up to higher orders, which the full difference covers; rounding comes on top.
template <typename T>
void expect_gradient(Problem& p, std::vector<T>& values, const Doubles& gradient,
                     const std::string& name) {
  ASSERT_EQ(values.size(), gradient.size());
  constexpr double kStep = 0x1p-9;
  const double rounding = 4 * rounding_of_loss(p) / kStep;
  double largest = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T kept = values[i];
    const auto slope = [&](double step) {
      values[i] = kept + static_cast<T>(step);
      const double above = p.loss();
      values[i] = kept - static_cast<T>(step);
      const double below = p.loss();
      values[i] = kept;
      return (above - below) / (2 * step);
    };
    const double coarse = slope(kStep);
    const double fine = slope(kStep / 2);
    ASSERT_NEAR(gradient[i], fine, std::abs(coarse - fine) + rounding) << name << "[" << i << "]";
    largest = std::max(largest, std::abs(gradient[i]));
  }
  EXPECT_GT(largest, 1000 * rounding) << name << ": rounding would hide an error";
}

TEST(FiniteDifferences, ConfirmEveryGradient) {
  Problem p = small_problem();
  const auto result = p.run(true);
  expect_gradient(p, p.x, result.d_x, "d_x");
  expect_gradient(p, p.w1, result.d_w1, "d_w1");
  expect_gradient(p, p.w2, result.d_w2, "d_w2");
  expect_gradient(p, p.weights, result.d_topk_weights, "d_topk_weights");
  for (const std::size_t masked : {5U, 6U}) EXPECT_EQ(result.d_topk_weights[masked], 0.0);
}

// --- main_grad ---

// The finished gradient is added once: fl(before + gradient), not a chain that starts elsewhere.
template <typename S>
void expect_accumulates(const Case& data, int num_ranks, const Schedule& schedule) {
  Ranks<S> ranks(data, {.num_ranks = num_ranks, .schedule = schedule});
  Step<S> step(data, ranks.placement());
  const CaseResult plain = ranks.forward_backward(step);
  std::vector<std::vector<float>> before_w1(at(num_ranks)), before_w2(at(num_ranks));
  ranks.all([&](cpu::RankLayer<S>& layer, int rank) {
    auto input = step.backward_input(rank);
    const std::vector<float> d_w1(input.d_w1.begin(), input.d_w1.end());
    const std::vector<float> d_w2(input.d_w2.begin(), input.d_w2.end());
    Rng rng(77, static_cast<std::uint64_t>(rank));
    for (float& value : input.d_w1) value = rng.normal();
    for (float& value : input.d_w2) value = rng.normal();
    const std::vector<float> old_w1(input.d_w1.begin(), input.d_w1.end());
    const std::vector<float> old_w2(input.d_w2.begin(), input.d_w2.end());
    input.accumulate = true;
    layer.backward(step.saved(rank), input);
    for (std::size_t i = 0; i < old_w1.size(); ++i) ASSERT_EQ(input.d_w1[i], old_w1[i] + d_w1[i]);
    for (std::size_t i = 0; i < old_w2.size(); ++i) ASSERT_EQ(input.d_w2[i], old_w2[i] + d_w2[i]);
  });
  const CaseResult again = step.result();
  EXPECT_EQ(again.out, plain.out);
  EXPECT_EQ(again.d_x, plain.d_x) << "accumulation concerns weight gradients only";
  EXPECT_EQ(again.d_topk_weights, plain.d_topk_weights);
}

TEST(MainGrad, IsAddedToOnce) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Case data = random_case({.tokens = 50, .hidden = 72, .ffn = 72}, dtype);
    for (std::uint64_t i = 0; i < 6; ++i) {
      with_storage(data,
                   [&]<typename S>(S) { expect_accumulates<S>(data, 3, sample_schedule(6, i)); });
    }
  }
}

TEST(MainGrad, OfAnExpertWithoutRowsIsLeftAlone) {
  Case data = random_case({.tokens = 30, .experts = 6, .topk = 2}, DType::f32);
  for (std::int32_t& id : data.topk_ids) id = id % 2 == 0 ? id : -1;  // odd experts get nothing
  Ranks<float> ranks(data, {.num_ranks = 2});
  Step<float> step(data, ranks.placement());
  ranks.forward_backward(step);
  // A signalling pattern and -0 would not survive an addition of zero.
  constexpr std::uint32_t kPattern = 0xFFA12345U;
  ranks.all([&](cpu::RankLayer<float>& layer, int rank) {
    auto input = step.backward_input(rank);
    for (float& value : input.d_w1) value = std::bit_cast<float>(kPattern);
    for (float& value : input.d_w2) value = -0.0F;
    input.accumulate = true;
    layer.backward(step.saved(rank), input);
    const std::size_t w = at(data.hidden * data.ffn);
    const auto& experts = ranks.placement().experts_of[at(rank)];
    for (std::size_t local = 0; local < experts.size(); ++local) {
      if (experts[local] % 2 == 0) continue;
      for (std::size_t i = 0; i < 2 * w; ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(input.d_w1[local * 2 * w + i]), kPattern);
      }
      for (std::size_t i = 0; i < w; ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(input.d_w2[local * w + i]), 0x80000000U);
      }
    }
  });
}

}  // namespace
}  // namespace uniep::test
