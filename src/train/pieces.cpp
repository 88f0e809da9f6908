// SPDX-License-Identifier: Apache-2.0
#include "train/pieces.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace uniep::train {
namespace {

constexpr float kNormEpsilon = 1e-5F;
constexpr std::size_t kLanes = 8;

// Σ term(i), i from 0 to n: eight chains side by side, which a compiler can keep in one register
// without changing an order, then the eight ascending.
template <typename Term>
float lane_sum(std::size_t n, Term term) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (std::size_t lane = 0; i < n; ++i, ++lane) lanes[lane] += term(i);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// In place; returns what the logits' exponentials summed to, and their maximum.
struct SoftmaxResult {
  float maximum;
  float sum;
};
SoftmaxResult softmax(std::span<float> row) {
  float maximum = -std::numeric_limits<float>::infinity();
  for (const float value : row) maximum = std::max(maximum, value);
  for (float& value : row) value = std::exp(value - maximum);
  const float sum = lane_sum(row.size(), [&](std::size_t i) { return row[i]; });
  for (float& value : row) value /= sum;
  return {maximum, sum};
}

}  // namespace

void multiply(const float* a, std::int64_t a_stride, std::span<const float> w, std::int64_t m,
              std::int64_t n, std::int64_t k, std::span<float> c, cpu::GemmScratch& scratch) {
  cpu::gemm_tile<float>({a, a_stride, 1}, {w.data(), 1, k}, m, n, k, c.data(), n, scratch);
}

void multiply_back(std::span<const float> d_c, std::span<const float> w, std::int64_t m,
                   std::int64_t n, std::int64_t k, std::span<float> d_a,
                   cpu::GemmScratch& scratch) {
  cpu::gemm_tile<float>({d_c.data(), n, 1}, {w.data(), k, 1}, m, k, n, d_a.data(), k, scratch);
}

void multiply_weights(std::span<const float> d_c, const float* a, std::int64_t a_stride,
                      std::int64_t m, std::int64_t n, std::int64_t k, std::span<float> d_w,
                      cpu::GemmScratch& scratch) {
  cpu::gemm_tile<float>({d_c.data(), 1, n}, {a, a_stride, 1}, n, k, m, d_w.data(), k, scratch);
}

void embed(std::span<const std::uint8_t> bytes, std::span<const float> embedding,
           std::span<float> embedded) {
  constexpr auto width = count(kEmbeddingWidth);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::copy_n(embedding.data() + bytes[i] * width, width, embedded.data() + i * width);
  }
}

void embed_backward(std::span<const std::uint8_t> bytes, std::span<const float> d_windows,
                    std::int64_t context, std::span<float> d_embedding) {
  constexpr auto width = count(kEmbeddingWidth);
  const auto span = count(context);
  const std::size_t tokens = bytes.size() + 1 - span;
  std::fill(d_embedding.begin(), d_embedding.end(), 0.0F);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    float* to = d_embedding.data() + bytes[i] * width;
    // Byte i is at place i - t of the window of token t.
    for (std::size_t t = i >= span ? i - span + 1 : 0; t < tokens && t <= i; ++t) {
      const float* from = d_windows.data() + (t * span + (i - t)) * width;
      for (std::size_t j = 0; j < width; ++j) to[j] += from[j];
    }
  }
}

void rms_norm(std::span<const float> x, std::span<const float> gain, std::span<float> y,
              std::span<float> inverse_rms) {
  const std::size_t width = gain.size();
  for (std::size_t t = 0; t < inverse_rms.size(); ++t) {
    const float* row = x.data() + t * width;
    const float squares = lane_sum(width, [&](std::size_t i) { return row[i] * row[i]; });
    inverse_rms[t] = 1.0F / std::sqrt(squares / static_cast<float>(width) + kNormEpsilon);
    for (std::size_t i = 0; i < width; ++i) y[t * width + i] = row[i] * inverse_rms[t] * gain[i];
  }
}

void rms_norm_backward(std::span<const float> x, std::span<const float> gain,
                       std::span<const float> inverse_rms, std::span<const float> d_y,
                       std::span<float> d_x, std::span<float> d_gain) {
  const std::size_t width = gain.size();
  std::fill(d_gain.begin(), d_gain.end(), 0.0F);
  for (std::size_t t = 0; t < inverse_rms.size(); ++t) {
    const float* row = x.data() + t * width;
    const float* d_row = d_y.data() + t * width;
    const float r = inverse_rms[t];
    const float dot = lane_sum(width, [&](std::size_t i) { return d_row[i] * gain[i] * row[i]; });
    const float shrink = dot * r * r / static_cast<float>(width);
    for (std::size_t i = 0; i < width; ++i) {
      d_x[t * width + i] += r * (d_row[i] * gain[i] - row[i] * shrink);
      d_gain[i] += d_row[i] * row[i] * r;
    }
  }
}

void route(std::span<float> logits, std::int64_t num_experts, std::int64_t topk,
           std::span<std::int32_t> ids, std::span<float> weights) {
  const auto experts = count(num_experts);
  const auto choices = count(topk);
  for (std::size_t t = 0; t * experts < logits.size(); ++t) {
    const auto row = logits.subspan(t * experts, experts);
    softmax(row);
    const auto chosen = ids.subspan(t * choices, choices);
    for (std::size_t j = 0; j < choices; ++j) {
      std::int32_t best = -1;
      for (std::size_t e = 0; e < experts; ++e) {
        const auto id = static_cast<std::int32_t>(e);
        if (std::find(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(j), id) !=
            chosen.begin() + static_cast<std::ptrdiff_t>(j)) {
          continue;
        }
        if (best < 0 || row[e] > row[static_cast<std::size_t>(best)]) best = id;
      }
      chosen[j] = best;
      weights[t * choices + j] = row[static_cast<std::size_t>(best)];
    }
  }
}

void route_backward(std::span<const float> probabilities, std::span<const std::int32_t> ids,
                    std::span<const float> d_weights, std::span<const float> balance,
                    std::span<float> d_logits) {
  const std::size_t experts = balance.size();
  const std::size_t tokens = probabilities.size() / experts;
  const std::size_t choices = tokens == 0 ? 0 : ids.size() / tokens;
  for (std::size_t t = 0; t < tokens; ++t) {
    const auto p = probabilities.subspan(t * experts, experts);
    const auto d = d_logits.subspan(t * experts, experts);
    std::copy(balance.begin(), balance.end(), d.begin());  // by the probabilities so far
    for (std::size_t j = 0; j < choices; ++j) {
      d[static_cast<std::size_t>(ids[t * choices + j])] += d_weights[t * choices + j];
    }
    const float mean = lane_sum(experts, [&](std::size_t e) { return p[e] * d[e]; });
    for (std::size_t e = 0; e < experts; ++e) d[e] = p[e] * (d[e] - mean);
  }
}

double cross_entropy(std::span<float> logits, std::span<const std::uint8_t> targets, float scale) {
  constexpr auto width = count(kBytes);
  double sum = 0;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const auto row = logits.subspan(t * width, width);
    const float target = row[targets[t]];
    const auto [maximum, total] = softmax(row);
    // From the logit, not from p, which may be 0.
    sum += std::log(static_cast<double>(total)) - (static_cast<double>(target) - maximum);
    row[targets[t]] -= 1.0F;
    for (float& value : row) value *= scale;
  }
  return sum;
}

}  // namespace uniep::train
