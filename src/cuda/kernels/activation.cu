// SPDX-License-Identifier: Apache-2.0
// SwiGLU times the top-k weight, forward and backward, on expert-major rows: a warp a row, in any
// order, since rows do not depend on each other. Padding rows become zeros, as operands of weight
// gradients must be.
#include "cuda/formulas.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/launch.hpp"
#include "cuda/split_args.hpp"

namespace uniep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTreeColumns = 64;  // of one tree of the d_topk_weights sum

// Calls body(row, lane) for every padded row of the rank.
template <typename Body>
__device__ __forceinline__ void for_each_row(const ActivationArgs& args, Body body) {
  if (args.counts->valid == 0) return;
  const std::int64_t rows = args.expert_starts[args.experts];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp; row < rows;
       row += std::int64_t{args.blocks} * kWarps) {
    body(row, static_cast<int>(threadIdx.x) % 32);
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationArgs args) {
  for_each_row(args, [&](std::int64_t row, int lane) {
    const bool is_padding = args.row_sources[row].rank < 0;
    const auto* const gate = static_cast<const Storage*>(args.h) + row * 2 * args.ffn;
    const Storage* const up = gate + args.ffn;
    auto* const a = static_cast<Storage*>(args.a) + row * args.ffn;
    const float weight = is_padding ? 0.0F : args.weights[row];
    for (std::int64_t column = lane; column < args.ffn; column += 32) {
      a[column] = is_padding ? Storage{}
                             : narrow<Storage>(activation<Storage>(widen(gate[column]),
                                                                   widen(up[column]), weight));
    }
  });
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    activation_gradient_kernel(const __grid_constant__ ActivationArgs args) {
  for_each_row(args, [&](std::int64_t row, int lane) {
    const bool is_padding = args.row_sources[row].rank < 0;
    const auto* const gate = static_cast<const Storage*>(args.h) + row * 2 * args.ffn;
    const Storage* const up = gate + args.ffn;
    const float* const d_a = args.d_a + row * args.ffn;
    auto* const a = static_cast<Storage*>(args.a) + row * args.ffn;
    auto* const d_gate = static_cast<Storage*>(args.d_h) + row * 2 * args.ffn;
    Storage* const d_up = d_gate + args.ffn;
    const float weight = is_padding ? 0.0F : args.weights[row];
    // A binary tree inside each block of 64 columns, neighbours first; blocks ascending.
    float d_weight = 0.0F;
    for (std::int64_t block = 0; block < args.ffn; block += kTreeColumns) {
      float terms[2] = {0.0F, 0.0F};
      UNIEP_UNROLL for (int i = 0; i < 2; ++i) {
        const std::int64_t column = block + 2 * lane + i;
        if (column >= args.ffn) continue;
        if (is_padding) {
          a[column] = d_gate[column] = d_up[column] = Storage{};
          continue;
        }
        const float g = widen(gate[column]);
        const float u = widen(up[column]);
        const ActivationGradient gradient = activation_gradient<Storage>(g, u, weight, d_a[column]);
        a[column] = narrow<Storage>(activation<Storage>(g, u, weight));
        d_gate[column] = narrow<Storage>(gradient.d_g);
        d_up[column] = narrow<Storage>(gradient.d_u);
        terms[i] = gradient.d_weight;
      }
      float sum = __fadd_rn(terms[0], terms[1]);
      UNIEP_UNROLL for (int distance = 1; distance < 32; distance *= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFU, sum, distance));
      }
      d_weight = __fadd_rn(d_weight, sum);
    }
    if (lane == 0 && !is_padding) args.d_weight_rows[row] = d_weight;
  });
}

}  // namespace

cudaError_t launch_activation(const ActivationArgs& args, cudaStream_t stream) {
  auto* const kernel =
      args.element_bytes == 2 ? activation_kernel<StoredBf16> : activation_kernel<float>;
  return launch(kernel, false, args.blocks, kThreads, 0, stream, args);
}

cudaError_t launch_activation_gradient(const ActivationArgs& args, cudaStream_t stream) {
  auto* const kernel = args.element_bytes == 2 ? activation_gradient_kernel<StoredBf16>
                                               : activation_gradient_kernel<float>;
  return launch(kernel, false, args.blocks, kThreads, 0, stream, args);
}

}  // namespace uniep::cuda
