// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/signal.hpp where kernels are run by threads of this machine.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "cuda_runtime.h"

namespace uniep::cuda::ptx {

inline std::uint64_t load_acquire_system(const std::uint64_t* word) {
  emulation::pause();
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(word))
      .load(std::memory_order_acquire);
}
inline std::uint64_t load_relaxed_system(const std::uint64_t* word) {
  return load_acquire_system(word);
}
inline void store_release_system(std::uint64_t* word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}
inline void store_relaxed_system(std::uint64_t* word, std::uint64_t value) {
  store_release_system(word, value);
}
inline void store_release_gpu(std::uint64_t* word, std::uint64_t value) {
  store_release_system(word, value);
}
inline std::uint64_t global_timer() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}

}  // namespace uniep::cuda::ptx
