// SPDX-License-Identifier: Apache-2.0
// The formulas of the numerics contract, one device function each, for split and fused kernels
// alike. Every operation is written with its rounding, so that no compiler may contract two into
// one. `Storage` tells bf16 and f32 apart: the first takes exp and the quotient from the
// special-function unit, the second from the accurate library functions.
#pragma once

#include <cstdint>

#include "cuda/ptx/arith.hpp"

namespace uniep::cuda {

using ptx::pack_bf16;

struct StoredBf16 {
  std::uint16_t bits;
};

__device__ __forceinline__ float first_of(std::uint32_t packed) {
  return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float second_of(std::uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000U);
}

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(StoredBf16 value) {
  return __uint_as_float(std::uint32_t{value.bits} << 16);
}

// One rounding to the storage type.
template <typename Storage>
__device__ __forceinline__ Storage narrow(float value);
template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ StoredBf16 narrow<StoredBf16>(float value) {
  return {static_cast<std::uint16_t>(pack_bf16(value, 0.0F))};
}

// 1 / (1 + exp(-g)) for silu and its slope. For large -g bf16's is +0: exp2 gives +inf.
template <typename Storage>
__device__ __forceinline__ float sigmoid(float g) {
  if constexpr (sizeof(Storage) == 2) {
    const float e = ptx::exp2_approx(__fmul_rn(g, -1.44269504F));
    return ptx::reciprocal_approx(__fadd_rn(1.0F, e));
  } else {
    return __fdiv_rn(1.0F, __fadd_rn(1.0F, expf(-g)));
  }
}

// g / (1 + exp(-g)).
template <typename Storage>
__device__ __forceinline__ float silu(float g) {
  if constexpr (sizeof(Storage) == 2) {
    return __fmul_rn(g, sigmoid<Storage>(g));
  } else {
    return __fdiv_rn(g, __fadd_rn(1.0F, expf(-g)));
  }
}

// (silu(g) * u) * weight, not yet rounded to the storage type.
template <typename Storage>
__device__ __forceinline__ float activation(float g, float u, float weight) {
  return __fmul_rn(__fmul_rn(silu<Storage>(g), u), weight);
}

// Derivatives of activation() by g and u, not yet rounded, and by the weight, for one column.
struct ActivationGradient {
  float d_g;
  float d_u;
  float d_weight;
};
template <typename Storage>
__device__ __forceinline__ ActivationGradient activation_gradient(float g, float u, float weight,
                                                                  float d_a) {
  const float sig = sigmoid<Storage>(g);
  const float s = silu<Storage>(g);
  const float scaled = __fmul_rn(d_a, weight);
  const float slope = __fmul_rn(sig, __fadd_rn(1.0F, __fmul_rn(g, __fsub_rn(1.0F, sig))));
  return {__fmul_rn(__fmul_rn(scaled, u), slope), __fmul_rn(scaled, s),
          __fmul_rn(__fmul_rn(s, u), d_a)};
}

}  // namespace uniep::cuda
