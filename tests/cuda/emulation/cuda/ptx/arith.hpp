// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/arith.hpp: the same roundings, and exp2 and the reciprocal as exact as
// they come, where the GPU is within 2 ulp.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda_runtime.h"
#include "uniep/bf16.hpp"

namespace uniep::cuda::ptx {

inline std::uint32_t pack_bf16(float first, float second) {
  return std::uint32_t{to_bf16(second).bits} << 16 | to_bf16(first).bits;
}
inline float exp2_approx(float value) { return std::exp2(value); }
inline float reciprocal_approx(float value) { return 1.0F / value; }

}  // namespace uniep::cuda::ptx
