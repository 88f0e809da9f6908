// SPDX-License-Identifier: Apache-2.0
// The sequential path: one rank, no threads, no tiles, loops in index order. It is what every other
// path must equal bit for bit (f32, bf16) and, in f64, what gradient checks are made against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/formulas.hpp"

namespace uniep::cpu {

template <typename S>
struct SequentialInput {
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int32_t num_experts = 1;
  std::int32_t topk = 1;
  std::span<const std::int32_t> topk_ids;  // [num_tokens, topk], -1 masked
  std::span<const float> topk_weights;     // [num_tokens, topk]
  std::span<const S> x;                    // [num_tokens, hidden]
  std::span<const S> w1;                   // [num_experts, 2 * ffn, hidden], gate rows first
  std::span<const S> w2;                   // [num_experts, hidden, ffn]
  std::span<const S> d_out;                // [num_tokens, hidden], where backward
  bool backward = false;
};

template <typename S>
struct SequentialResult {
  std::vector<S> out;                  // [num_tokens, hidden]
  std::vector<S> d_x;                  // [num_tokens, hidden]
  std::vector<Acc<S>> d_topk_weights;  // [num_tokens, topk]
  std::vector<Acc<S>> d_w1;            // like w1
  std::vector<Acc<S>> d_w2;            // like w2
};

template <typename S>
[[nodiscard]] SequentialResult<S> run_sequential(const SequentialInput<S>& input);

extern template SequentialResult<float> run_sequential(const SequentialInput<float>&);
extern template SequentialResult<Bf16> run_sequential(const SequentialInput<Bf16>&);
extern template SequentialResult<double> run_sequential(const SequentialInput<double>&);

}  // namespace uniep::cpu
