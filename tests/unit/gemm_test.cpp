// SPDX-License-Identifier: Apache-2.0
// One matrix product tile against the plain loop it promises to equal bit for bit, and the scalar
// formulas against f64.
#include "cpu/gemm.hpp"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "cpu/formulas.hpp"

namespace uniep::cpu {
namespace {

template <typename S>
S make(float value) {
  if constexpr (std::is_same_v<S, Bf16>) {
    return to_bf16(value);
  } else {
    return value;
  }
}

// Normal values over a wide range of exponents, with zeros of both signs and subnormals.
template <typename S>
std::vector<S> wild_values(std::size_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<S> values(count);
  for (S& value : values) {
    switch (rng.below(16)) {
      case 0:
        value = make<S>(-0.0F);
        break;
      case 1:
        value = make<S>(0.0F);
        break;
      case 2:
        value = make<S>(std::ldexp(rng.normal(), -130));
        break;
      default:
        value = make<S>(std::ldexp(rng.normal(), static_cast<int>(rng.below(41)) - 20));
    }
  }
  return values;
}

// The contract, written out: one chain of fused multiply-adds an element, from +0, k ascending.
template <typename S>
float chain(const MatrixView<S>& a, const MatrixView<S>& b, std::int64_t i, std::int64_t j,
            std::int64_t k) {
  float acc = 0.0F;
  for (std::int64_t p = 0; p < k; ++p) {
    acc = std::fma(widen(a.data[i * a.row_stride + p * a.col_stride]),
                   widen(b.data[p * b.row_stride + j * b.col_stride]), acc);
  }
  return acc;
}

constexpr float kCanary = 12345.5F;

template <typename S>
void expect_chain(MatrixView<S> a, MatrixView<S> b, std::int64_t m, std::int64_t n, std::int64_t k,
                  GemmScratch& scratch) {
  const std::int64_t ldc = n + 3;
  std::vector<float> want(static_cast<std::size_t>((m + 1) * ldc), kCanary);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      want[static_cast<std::size_t>(i * ldc + j)] = chain(a, b, i, j, k);
    }
  }
  for (const InstructionSet set : instruction_sets()) {
    std::vector<float> c(want.size(), kCanary);
    gemm_tile(a, b, m, n, k, c.data(), ldc, scratch, set);
    for (std::size_t i = 0; i < c.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(c[i]), std::bit_cast<std::uint32_t>(want[i]))
          << c[i] << " instead of " << want[i] << " at " << i / static_cast<std::size_t>(ldc)
          << ", " << i % static_cast<std::size_t>(ldc) << " of " << m << " x " << n << " x " << k
          << " with " << to_string(set);
    }
  }
}

struct Size {
  std::int64_t m, n, k;
};
constexpr std::array<Size, 16> kSizes{{{1, 1, 1},
                                       {1, 1, 0},
                                       {5, 15, 3},
                                       {6, 16, 256},
                                       {7, 17, 257},
                                       {12, 32, 255},
                                       {13, 31, 513},
                                       {64, 128, 72},
                                       {45, 100, 136},
                                       {8, 64, 776},
                                       {3, 5, 1416},
                                       {2, 18, 2056},
                                       {1, 16, 2880},
                                       {127, 33, 9},
                                       {6, 15, 511},
                                       {18, 48, 2}}};

// Every pair of operand forms the layer uses: rows times transposed weights (h, y), rows times
// weights (d_a, d_x) and transposed rows times rows (the weight gradients).
template <typename S>
void expect_all_forms() {
  GemmScratch scratch;
  std::uint64_t seed = 1;
  for (const Size& s : kSizes) {
    const std::int64_t a_stride = s.k + 5;
    const auto a = wild_values<S>(static_cast<std::size_t>(s.m * a_stride + 1), ++seed);
    const auto a_t = wild_values<S>(static_cast<std::size_t>(s.k * (s.m + 2) + 1), ++seed);
    const auto b = wild_values<S>(static_cast<std::size_t>(s.k * (s.n + 7) + 1), ++seed);
    const auto b_t = wild_values<S>(static_cast<std::size_t>(s.n * (s.k + 4) + 1), ++seed);
    const MatrixView<S> rows{a.data(), a_stride, 1};
    const MatrixView<S> rows_t{a_t.data(), 1, s.m + 2};
    const MatrixView<S> weights{b.data(), s.n + 7, 1};
    const MatrixView<S> weights_t{b_t.data(), 1, s.k + 4};
    ASSERT_NO_FATAL_FAILURE(expect_chain(rows, weights_t, s.m, s.n, s.k, scratch));
    ASSERT_NO_FATAL_FAILURE(expect_chain(rows, weights, s.m, s.n, s.k, scratch));
    ASSERT_NO_FATAL_FAILURE(expect_chain(rows_t, weights, s.m, s.n, s.k, scratch));
    ASSERT_NO_FATAL_FAILURE(expect_chain(rows_t, weights_t, s.m, s.n, s.k, scratch));
  }
}

TEST(Gemm, EveryElementIsOneAscendingChainF32) { expect_all_forms<float>(); }
TEST(Gemm, EveryElementIsOneAscendingChainBf16) { expect_all_forms<Bf16>(); }

// A row's bits are the same whatever tile it is computed in and whoever its neighbours are.
TEST(Gemm, TilesAndNeighboursDoNotChangeBits) {
  constexpr std::int64_t kM = 50, kN = 90, kK = 300;
  const auto a = wild_values<float>(kM * kK, 5);
  const auto b = wild_values<float>(kN * kK, 6);
  GemmScratch scratch;
  std::vector<float> whole(kM * kN);
  gemm_tile(MatrixView<float>{a.data(), kK, 1}, MatrixView<float>{b.data(), 1, kK}, kM, kN, kK,
            whole.data(), kN, scratch);
  for (const auto& [tile_m, tile_n] : {std::pair{1, 90}, {8, 64}, {7, 13}, {33, 1}, {50, 16}}) {
    std::vector<float> tiled(kM * kN, kCanary);
    for (std::int64_t i = 0; i < kM; i += tile_m) {
      for (std::int64_t j = 0; j < kN; j += tile_n) {
        gemm_tile(MatrixView<float>{a.data() + i * kK, kK, 1},
                  MatrixView<float>{b.data() + j * kK, 1, kK},
                  std::min<std::int64_t>(tile_m, kM - i), std::min<std::int64_t>(tile_n, kN - j),
                  kK, tiled.data() + i * kN + j, kN, scratch);
      }
    }
    EXPECT_EQ(std::memcmp(tiled.data(), whole.data(), whole.size() * sizeof(float)), 0)
        << tile_m << " x " << tile_n;
  }
}

// Trailing zero operands add +0 to a chain, which no value but -0 notices; a chain starts at +0.
TEST(Gemm, MinusZero) {
  GemmScratch scratch;
  const std::array<float, 2> a{-0.0F, -0.0F};
  const std::array<float, 2> b{1.0F, 2.0F};
  float c = kCanary;
  gemm_tile(MatrixView<float>{a.data(), 2, 1}, MatrixView<float>{b.data(), 1, 1}, 1, 1, 2, &c, 1,
            scratch);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(c), 0U) << "+0 + -0 is +0";
  gemm_tile(MatrixView<float>{a.data(), 2, 1}, MatrixView<float>{b.data(), 1, 1}, 1, 1, 0, &c, 1,
            scratch);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(c), 0U) << "an empty chain is +0";
}

TEST(Gemm, NanAndInfinityStayInTheirRowAndColumn) {
  constexpr std::int64_t kSize = 20;
  std::vector<float> a(kSize * kSize, 1.0F);
  std::vector<float> b(kSize * kSize, 1.0F);
  a[3 * kSize + 7] = std::numeric_limits<float>::quiet_NaN();
  a[11 * kSize + 2] = std::numeric_limits<float>::infinity();
  b[9 * kSize + 4] = -std::numeric_limits<float>::infinity();
  std::vector<float> c(kSize * kSize);
  GemmScratch scratch;
  gemm_tile(MatrixView<float>{a.data(), kSize, 1}, MatrixView<float>{b.data(), kSize, 1}, kSize,
            kSize, kSize, c.data(), kSize, scratch);
  for (std::int64_t i = 0; i < kSize; ++i) {
    for (std::int64_t j = 0; j < kSize; ++j) {
      const float value = c[static_cast<std::size_t>(i * kSize + j)];
      if (i == 3 || (i == 11 && j == 4)) {
        EXPECT_TRUE(std::isnan(value)) << i << ", " << j;
      } else if (i == 11) {
        EXPECT_EQ(value, std::numeric_limits<float>::infinity());
      } else if (j == 4) {
        EXPECT_EQ(value, -std::numeric_limits<float>::infinity());
      } else {
        EXPECT_EQ(value, 20.0F);
      }
    }
  }
}

TEST(Gemm, TheBestInstructionSetIsOneItTests) {
  EXPECT_EQ(instruction_sets().front(), InstructionSet::generic);
  EXPECT_EQ(to_string(best_instruction_set()), to_string(instruction_sets().back()));
}

TEST(Formulas, StoredNansAreOneNan) {
  const auto negative_payload = std::bit_cast<float>(0xFFC01234U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(narrow<float>(negative_payload)), 0x7FC00000U);
  EXPECT_EQ(narrow<Bf16>(negative_payload).bits, 0x7FC0U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(canonical(negative_payload)), 0x7FC00000U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(canonical(-0.0F)), 0x80000000U);
  EXPECT_EQ(std::bit_cast<std::uint32_t>(narrow<float>(-0.0F)), 0x80000000U);
}

// Each operation of the formulas rounds once, so a few units in the last place separate them from
// f64; the count is that of the operations, and exp counts as two.
TEST(Formulas, ActivationIsSiluOfGateTimesUpTimesWeight) {
  Rng rng(8);
  constexpr double kUnit = 0x1p-24;
  for (int i = 0; i < 20'000; ++i) {
    const float g = 3.0F * rng.normal();
    const float u = rng.normal();
    const float weight = rng.normal();
    const double exact = static_cast<double>(g) / (1.0 + std::exp(-static_cast<double>(g))) *
                         static_cast<double>(u) * static_cast<double>(weight);
    // exp (2), the sum, the quotient, two products.
    EXPECT_NEAR(static_cast<double>(activation(g, u, weight)), exact, 6 * kUnit * std::abs(exact));
    const Bf16 bg = to_bf16(g);
    const Bf16 bu = to_bf16(u);
    const double wide_g = to_float(bg);
    const double rounded =
        wide_g / (1.0 + std::exp(-wide_g)) * static_cast<double>(to_float(bu)) * weight;
    EXPECT_NEAR(static_cast<double>(to_float(activation(bg, bu, weight))), rounded,
                (0x1p-8 + 7 * kUnit) * std::abs(rounded));
  }
}

TEST(Formulas, ActivationAtTheEdges) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(activation(0.0F, 5.0F, 1.0F), 0.0F);
  EXPECT_EQ(activation(100.0F, 2.0F, 0.5F), 100.0F);
  EXPECT_EQ(activation(-200.0F, 2.0F, 1.0F), 0.0F) << "exp overflows, the quotient vanishes";
  EXPECT_EQ(activation(infinity, 1.0F, 1.0F), infinity);
  EXPECT_TRUE(std::isnan(activation(-infinity, 1.0F, 1.0F)));
  EXPECT_TRUE(std::isnan(activation(std::nanf(""), 1.0F, 0.0F)));
}

// Derivatives by central differences of an f64 written here.
TEST(Formulas, GradientIsTheDerivativeOfTheActivation) {
  const auto f = [](double g, double u, double w) { return g / (1.0 + std::exp(-g)) * u * w; };
  Rng rng(9);
  constexpr double kStep = 0x1p-17;
  // Central differences are off by step^2 / 6 times a third derivative (below 1 in silu) and by
  // rounding of f over the step.
  for (int i = 0; i < 5'000; ++i) {
    const double g = rng.normal();
    const double u = rng.normal();
    const float weight = rng.normal();
    const double w = static_cast<double>(weight);
    const double d_a = rng.normal();
    const auto gradient = activation_gradient<double>(g, u, weight, d_a);
    const double scale =
        (1 + std::abs(g)) * (1 + std::abs(u)) * (1 + std::abs(w)) * (1 + std::abs(d_a));
    const double allowed = scale * (kStep * kStep + 0x1p-50 / kStep);
    EXPECT_NEAR(gradient.d_g, d_a * (f(g + kStep, u, w) - f(g - kStep, u, w)) / (2 * kStep),
                allowed);
    EXPECT_NEAR(gradient.d_u, d_a * (f(g, u + kStep, w) - f(g, u - kStep, w)) / (2 * kStep),
                allowed);
    EXPECT_NEAR(gradient.d_weight, d_a * (f(g, u, w + kStep) - f(g, u, w - kStep)) / (2 * kStep),
                allowed);
  }
}

TEST(Formulas, TreeAddsNeighboursFirst) {
  // 2^24 + 1 is lost in a chain and kept where the small neighbours meet first.
  std::vector<float> terms(64, 0.0F);
  terms[0] = 0x1p24F;
  terms[2] = 1.0F;
  terms[3] = 1.0F;
  EXPECT_EQ(tree_sum<float>(terms), 0x1p24F + 2.0F);
  float chained = 0;
  for (const float term : terms) chained += term;
  EXPECT_EQ(chained, 0x1p24F);
  terms.resize(5);
  EXPECT_EQ(tree_sum<float>(terms), 0x1p24F + 2.0F) << "a short block is filled with zeros";
  EXPECT_EQ(tree_sum<float>(std::span<const float>{}), 0.0F);
}

}  // namespace
}  // namespace uniep::cpu
