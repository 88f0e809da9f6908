// SPDX-License-Identifier: Apache-2.0
// Conversions and the approximate functions of the special-function unit: within 2 ulp each, and a
// fixed function of the input on sm_90.
#pragma once

#include <cstdint>

namespace uniep::cuda::ptx {

// Two values rounded to bf16 (nearest, ties to even), the first in the lower half.
__device__ __forceinline__ std::uint32_t pack_bf16(float first, float second) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
  return packed;
}

__device__ __forceinline__ float exp2_approx(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ float reciprocal_approx(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

}  // namespace uniep::cuda::ptx
