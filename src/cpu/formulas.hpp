// SPDX-License-Identifier: Apache-2.0
// The formulas of the numerics contract (docs/design/numerics.md), one function each, called by the
// sequential and by the threaded path. Compiled without contraction: each operation rounds once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "uniep/bf16.hpp"

namespace uniep::cpu {

// Storage type -> type of accumulation.
template <typename S>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename S>
using Acc = typename Accumulator<S>::type;

inline float widen(Bf16 value) { return to_float(value); }
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

// One rounding to the storage type. A NaN is stored as the one canonical quiet NaN, since which
// payload survives an fma depends on its operand order, which compilers choose.
template <typename S>
S narrow(Acc<S> value) {
  if (std::isnan(value)) value = std::numeric_limits<Acc<S>>::quiet_NaN();
  if constexpr (std::is_same_v<S, Bf16>) {
    return to_bf16(value);
  } else {
    return value;
  }
}

template <typename A>
A canonical(A value) {
  return std::isnan(value) ? std::numeric_limits<A>::quiet_NaN() : value;
}

template <typename A>
A silu(A g) {
  return g / (A{1} + std::exp(-g));
}

// a = round(silu(g) * u * weight)
template <typename S>
S activation(S g, S u, float weight) {
  const Acc<S> product = silu(widen(g)) * widen(u);
  return narrow<S>(product * static_cast<Acc<S>>(weight));
}

template <typename S>
struct ActivationGradient {
  S d_g;
  S d_u;
  Acc<S> d_weight;  // this column's term of d_topk_weights
};

// Derivatives of activation() by g, u and weight, for one column.
template <typename S>
ActivationGradient<S> activation_gradient(S stored_g, S stored_u, float weight, Acc<S> d_a) {
  using A = Acc<S>;
  const A g = widen(stored_g);
  const A u = widen(stored_u);
  const A sigmoid = A{1} / (A{1} + std::exp(-g));
  const A s = silu(g);
  const A scaled = d_a * static_cast<A>(weight);
  const A slope = sigmoid * (A{1} + g * (A{1} - sigmoid));
  return {.d_g = narrow<S>(scaled * u * slope),
          .d_u = narrow<S>(scaled * s),
          .d_weight = (s * u) * d_a};
}

inline constexpr std::int64_t kTreeBlock = 64;  // columns of one tree of the d_topk_weights sum

// Binary tree over one aligned block of at most 64 terms: neighbours first; a short block is
// filled with +0. The blocks are then added ascending, from +0.
template <typename A>
A tree_sum(std::span<const A> terms) {
  A level[kTreeBlock] = {};
  std::copy(terms.begin(), terms.end(), level);
  for (std::int64_t width = kTreeBlock; width > 1; width /= 2) {
    for (std::int64_t i = 0; i < width / 2; ++i) level[i] = level[2 * i] + level[2 * i + 1];
  }
  return level[0];
}

}  // namespace uniep::cpu
