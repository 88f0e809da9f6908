// SPDX-License-Identifier: Apache-2.0
// Loads and stores of signal words, and the clock that bounds waits. "system" reaches other GPUs
// and the host, "gpu" the blocks of this one.
#pragma once

#include <cstdint>

namespace uniep::cuda::ptx {

__device__ __forceinline__ std::uint64_t load_acquire_system(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ std::uint64_t load_relaxed_system(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// After a fence: many words for one fence.
__device__ __forceinline__ void store_relaxed_system(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void store_release_gpu(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// Nanoseconds. Ticks coarsely: good for bounds, not for timings.
__device__ __forceinline__ std::uint64_t global_timer() {
  std::uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace uniep::cuda::ptx
