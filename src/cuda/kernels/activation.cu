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

// One block a multiprocessor, with enough loads in flight for its share of the memory's rate.
constexpr int kThreads = 1024;
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

// kColumns neighbours of a row, as floats: 8 are loaded and stored in 16 bytes at a time, of 2 only
// the first `valid`.
template <int kColumns>
__device__ __forceinline__ void load_columns(const float* from, std::int64_t valid,
                                             float (&to)[kColumns]) {
  if constexpr (kColumns == 8) {
    UNIEP_UNROLL for (int half = 0; half < 2; ++half) {
      const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(from) + half);
      const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
      UNIEP_UNROLL for (int i = 0; i < 4; ++i) to[4 * half + i] = __uint_as_float(words[i]);
    }
  } else {
    UNIEP_UNROLL for (int i = 0; i < kColumns; ++i) to[i] = i < valid ? from[i] : 0.0F;
  }
}
template <int kColumns>
__device__ __forceinline__ void load_columns(const StoredBf16* from, std::int64_t valid,
                                             float (&to)[kColumns]) {
  if constexpr (kColumns == 8) {
    const uint4 packed = __ldcg(reinterpret_cast<const uint4*>(from));
    const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      to[2 * i] = first_of(words[i]);
      to[2 * i + 1] = second_of(words[i]);
    }
  } else {
    UNIEP_UNROLL for (int i = 0; i < kColumns; ++i) to[i] = i < valid ? widen(from[i]) : 0.0F;
  }
}

template <int kColumns>
__device__ __forceinline__ void store_columns(float* to, std::int64_t valid,
                                              const float (&from)[kColumns]) {
  if constexpr (kColumns == 8) {
    UNIEP_UNROLL for (int half = 0; half < 2; ++half) {
      const float* const four = from + 4 * half;
      reinterpret_cast<uint4*>(to)[half] = {__float_as_uint(four[0]), __float_as_uint(four[1]),
                                            __float_as_uint(four[2]), __float_as_uint(four[3])};
    }
  } else {
    UNIEP_UNROLL for (int i = 0; i < kColumns; ++i) {
      if (i < valid) to[i] = from[i];
    }
  }
}
template <int kColumns>
__device__ __forceinline__ void store_columns(StoredBf16* to, std::int64_t valid,
                                              const float (&from)[kColumns]) {
  if constexpr (kColumns == 8) {
    *reinterpret_cast<uint4*>(to) = {pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]),
                                     pack_bf16(from[4], from[5]), pack_bf16(from[6], from[7])};
  } else {
    UNIEP_UNROLL for (int i = 0; i < kColumns; ++i) {
      if (i < valid) to[i] = narrow<StoredBf16>(from[i]);
    }
  }
}

// A lane takes kColumns neighbours: 8 where rows are of whole 8, else 2.
template <typename Storage, int kColumns>
__global__ void __launch_bounds__(kThreads)
    activation_gradient_kernel(const __grid_constant__ ActivationArgs args) {
  constexpr int kTreeLanes = kTreeColumns / kColumns;
  for_each_row(args, [&](std::int64_t row, int lane) {
    const bool is_padding = args.row_sources[row].rank < 0;
    const auto* const gate = static_cast<const Storage*>(args.h) + row * 2 * args.ffn;
    const Storage* const up = gate + args.ffn;
    const float* const d_a_row = args.d_a + row * args.ffn;
    auto* const a_row = static_cast<Storage*>(args.a) + row * args.ffn;
    auto* const d_gate = static_cast<Storage*>(args.d_h) + row * 2 * args.ffn;
    Storage* const d_up = d_gate + args.ffn;
    const float weight = is_padding ? 0.0F : args.weights[row];
    // A binary tree inside each block of 64 columns, neighbours first; blocks ascending.
    float d_weight = 0.0F;
    for (std::int64_t first = 0; first < args.ffn; first += 32 * kColumns) {
      const std::int64_t column = first + kColumns * lane;
      const std::int64_t valid = args.ffn - column;
      float terms[kColumns] = {};
      if (valid > 0) {
        float a[kColumns] = {}, d_g[kColumns] = {}, d_u[kColumns] = {};
        if (!is_padding) {
          float g[kColumns], u[kColumns], d_a[kColumns];
          load_columns(gate + column, valid, g);
          load_columns(up + column, valid, u);
          load_columns(d_a_row + column, valid, d_a);
          UNIEP_UNROLL for (int i = 0; i < kColumns; ++i) {
            const ActivationGradient gradient =
                activation_gradient<Storage>(g[i], u[i], weight, d_a[i]);
            a[i] = activation<Storage>(g[i], u[i], weight);
            d_g[i] = gradient.d_g;
            d_u[i] = gradient.d_u;
            if (i < valid) terms[i] = gradient.d_weight;
          }
        }
        store_columns(a_row + column, valid, a);
        store_columns(d_gate + column, valid, d_g);
        store_columns(d_up + column, valid, d_u);
      }
      UNIEP_UNROLL for (int width = kColumns; width > 1; width /= 2) {
        UNIEP_UNROLL for (int i = 0; i < width / 2; ++i) {
          terms[i] = __fadd_rn(terms[2 * i], terms[2 * i + 1]);
        }
      }
      UNIEP_UNROLL for (int distance = 1; distance < kTreeLanes; distance *= 2) {
        terms[0] = __fadd_rn(terms[0], __shfl_xor_sync(0xFFFFFFFFU, terms[0], distance));
      }
      UNIEP_UNROLL for (int lead = 0; lead < 32; lead += kTreeLanes) {
        const float tree = __shfl_sync(0xFFFFFFFFU, terms[0], lead);
        if (first + kColumns * lead < args.ffn) d_weight = __fadd_rn(d_weight, tree);
      }
    }
    if (lane == 0 && !is_padding) args.d_weight_rows[row] = d_weight;
  });
}

template <typename Storage>
auto* gradient_kernel(std::int64_t ffn) {
  return ffn % 8 == 0 ? activation_gradient_kernel<Storage, 8>
                      : activation_gradient_kernel<Storage, 2>;
}

}  // namespace

cudaError_t launch_activation(const ActivationArgs& args, cudaStream_t stream) {
  auto* const kernel =
      args.element_bytes == 2 ? activation_kernel<StoredBf16> : activation_kernel<float>;
  return launch(kernel, false, args.blocks, kThreads, 0, stream, args);
}

cudaError_t launch_activation_gradient(const ActivationArgs& args, cudaStream_t stream) {
  auto* const kernel = args.element_bytes == 2 ? gradient_kernel<StoredBf16>(args.ffn)
                                               : gradient_kernel<float>(args.ffn);
  return launch(kernel, false, args.blocks, kThreads, 0, stream, args);
}

}  // namespace uniep::cuda
