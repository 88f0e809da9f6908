// SPDX-License-Identifier: Apache-2.0
// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019), element by element,
// so that any split of the weights over ranks gives the same bits.
#pragma once

#include <cstdint>
#include <span>

namespace uniep::train {

// What step number `step` (from 1) multiplies with.
struct AdamWStep {
  AdamWStep(double learning_rate, std::int64_t step);
  float rate;          // warmed up over the first steps, then falling with 1/sqrt(step)
  float m_correction;  // 1 / (1 - beta1^step)
  float v_correction;
};

void adamw(const AdamWStep& step, std::span<const float> gradient, bool decays,
           std::span<float> value, std::span<float> m, std::span<float> v);

}  // namespace uniep::train
