// SPDX-License-Identifier: Apache-2.0
// What the GPU test programs share beyond cuda_host.hpp: random values and comparisons that need no
// host copy. Only the toolkit and the standard library, so that a bare machine can run them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda_host.hpp"

namespace uniep::cuda_test {

using bf16 = __nv_bfloat16;

__device__ inline std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

// Close to normal, from four 16-bit uniforms.
__device__ inline float random_normal(std::uint64_t seed, std::int64_t index) {
  const std::uint64_t bits = mix(mix(seed) + static_cast<std::uint64_t>(index));
  float sum = -131070.0F;
  for (int shift = 0; shift < 64; shift += 16) sum += static_cast<float>((bits >> shift) & 0xFFFFU);
  return sum * (1.7320508F / 65536.0F);
}

__device__ inline void put(bf16& to, float value) { to = __float2bfloat16_rn(value); }
__device__ inline void put(float& to, float value) { to = value; }
__device__ inline double get(bf16 value) { return static_cast<double>(__bfloat162float(value)); }
__device__ inline double get(float value) { return static_cast<double>(value); }

template <typename T>
__global__ void fill_random_kernel(T* data, std::int64_t count, std::uint64_t seed, float scale) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    put(data[i], scale * random_normal(seed, i));
  }
}

template <typename T>
void fill_random(const Buffer<T>& buffer, std::uint64_t seed, float scale = 1.0F) {
  fill_random_kernel<<<1024, 256>>>(buffer.get(), buffer.count(), seed, scale);
}

template <typename T>
__global__ void count_differences_kernel(const T* a, const T* b, std::int64_t count,
                                         unsigned long long* differences) {
  unsigned long long mine = 0;
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine != 0) atomicAdd(differences, mine);
}

// Bit patterns that differ, NaNs included.
template <typename T>
std::uint64_t count_differences(const T* a, const T* b, std::int64_t count) {
  Buffer<unsigned long long> differences(std::vector<unsigned long long>{0});
  if constexpr (sizeof(T) == 2) {
    count_differences_kernel<<<1024, 256>>>(reinterpret_cast<const std::uint16_t*>(a),
                                            reinterpret_cast<const std::uint16_t*>(b), count,
                                            differences.get());
  } else {
    count_differences_kernel<<<1024, 256>>>(reinterpret_cast<const std::uint32_t*>(a),
                                            reinterpret_cast<const std::uint32_t*>(b), count,
                                            differences.get());
  }
  return differences.download()[0];
}

}  // namespace uniep::cuda_test
