// SPDX-License-Identifier: Apache-2.0
// The pieces of the model around the experts, each with its derivative. Every sum has a written
// order that depends on sizes of the model and of a chunk alone, so any split over ranks gives the
// same bits. T is the number of tokens in the call; matrices are row-major.
#pragma once

#include <cstdint>
#include <span>

#include "cpu/gemm.hpp"
#include "train/config.hpp"

namespace uniep::train {

// c [m, n] = a [m, k] · w [n, k]ᵀ; rows of a are a_stride floats apart, and may overlap.
void multiply(const float* a, std::int64_t a_stride, std::span<const float> w, std::int64_t m,
              std::int64_t n, std::int64_t k, std::span<float> c, cpu::GemmScratch& scratch);
// d_a [m, k] = d_c [m, n] · w [n, k]
void multiply_back(std::span<const float> d_c, std::span<const float> w, std::int64_t m,
                   std::int64_t n, std::int64_t k, std::span<float> d_a, cpu::GemmScratch& scratch);
// d_w [n, k] = d_c [m, n]ᵀ · a [m, k], rows ascending
void multiply_weights(std::span<const float> d_c, const float* a, std::int64_t a_stride,
                      std::int64_t m, std::int64_t n, std::int64_t k, std::span<float> d_w,
                      cpu::GemmScratch& scratch);

// Context mixing is a causal convolution: the embeddings of a sequence's bytes lie in a row, and
// the input of prediction t is the `context` of them that end before byte t. So it is `multiply`
// with rows that overlap, one embedding apart. `bytes` has context + T - 1 bytes.
void embed(std::span<const std::uint8_t> bytes, std::span<const float> embedding,
           std::span<float> embedded);
// d_windows [T, context * kEmbeddingWidth], the derivative by those rows, is added up over their
// overlaps (bytes ascending, then T ascending) and written to d_embedding [256, kEmbeddingWidth].
void embed_backward(std::span<const std::uint8_t> bytes, std::span<const float> d_windows,
                    std::int64_t context, std::span<float> d_embedding);

// y = x / rms(x) * gain; inverse_rms [T] is kept for the way back.
void rms_norm(std::span<const float> x, std::span<const float> gain, std::span<float> y,
              std::span<float> inverse_rms);
// Adds to d_x; writes d_gain, T ascending.
void rms_norm_backward(std::span<const float> x, std::span<const float> gain,
                       std::span<const float> inverse_rms, std::span<const float> d_y,
                       std::span<float> d_x, std::span<float> d_gain);

// Logits [T, E] become probabilities; a token's choices are its topk likeliest experts, likeliest
// first, the lower number where equal, weighted with their probabilities.
void route(std::span<float> logits, std::int64_t num_experts, std::int64_t topk,
           std::span<std::int32_t> ids, std::span<float> weights);
// d_weights [T, k] by the choices, and balance [E] by every token's probabilities.
void route_backward(std::span<const float> probabilities, std::span<const std::int32_t> ids,
                    std::span<const float> d_weights, std::span<const float> balance,
                    std::span<float> d_logits);

// Returns the sum of -ln p(target), T ascending; logits [T, 256] become derivatives of scale times
// that sum.
double cross_entropy(std::span<float> logits, std::span<const std::uint8_t> targets, float scale);

}  // namespace uniep::train
