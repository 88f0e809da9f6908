// SPDX-License-Identifier: Apache-2.0
// The formulas of the numerics contract, one device function each, for split and fused kernels
// alike. Every operation is written with its rounding, so that no compiler may contract two into
// one.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace uniep::cuda {

// Two values rounded to bf16 (nearest, ties to even), the first in the lower half.
__device__ __forceinline__ std::uint32_t pack_bf16(float first, float second) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}
__device__ __forceinline__ float first_of(std::uint32_t packed) {
  return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float second_of(std::uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000U);
}

// g / (1 + exp(-g)). The special-function unit's exp2 and reciprocal are within 2 ulp each; their
// results are a fixed function of the input on sm_90. For large -g the product is -0 or tiny, as it
// should be: exp2 gives +inf, its reciprocal +0.
__device__ __forceinline__ float silu(float g) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(g, -1.44269504F)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(__fadd_rn(1.0F, e)));
  return __fmul_rn(g, r);
}

// (silu(g) * u) * weight, not yet rounded to the storage type.
__device__ __forceinline__ float activation(float g, float u, float weight) {
  return __fmul_rn(__fmul_rn(silu(g), u), weight);
}

}  // namespace uniep::cuda
