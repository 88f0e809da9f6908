// SPDX-License-Identifier: Apache-2.0
#include "train/optimizer.hpp"

#include <algorithm>
#include <cmath>

namespace uniep::train {
namespace {

constexpr double kBeta1 = 0.9;
constexpr double kBeta2 = 0.99;
constexpr float kEpsilon = 1e-8F;
constexpr float kDecay = 0.01F;
constexpr double kWarmup = 30;  // steps

}  // namespace

AdamWStep::AdamWStep(double learning_rate, std::int64_t step) {
  const auto t = static_cast<double>(step);
  // No function of the last step: a run may be continued for longer than was planned.
  rate = static_cast<float>(learning_rate * std::min(t / kWarmup, std::sqrt(kWarmup / t)));
  m_correction = static_cast<float>(1.0 / (1.0 - std::pow(kBeta1, t)));
  v_correction = static_cast<float>(1.0 / (1.0 - std::pow(kBeta2, t)));
}

void adamw(const AdamWStep& step, std::span<const float> gradient, bool decays,
           std::span<float> value, std::span<float> m, std::span<float> v) {
  constexpr auto b1 = static_cast<float>(kBeta1);
  constexpr auto b2 = static_cast<float>(kBeta2);
  const float keep = decays ? 1.0F - step.rate * kDecay : 1.0F;
  for (std::size_t i = 0; i < value.size(); ++i) {
    const float g = gradient[i];
    m[i] = b1 * m[i] + (1.0F - b1) * g;
    v[i] = b2 * v[i] + (1.0F - b2) * (g * g);
    const float direction =
        (m[i] * step.m_correction) / (std::sqrt(v[i] * step.v_correction) + kEpsilon);
    value[i] = value[i] * keep - step.rate * direction;
  }
}

}  // namespace uniep::train
