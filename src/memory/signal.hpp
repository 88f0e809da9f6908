// SPDX-License-Identifier: Apache-2.0
// Signals: 64-bit words that carry epochs and only grow; a stale value is recognised, never
// cleared.
#pragma once

#include <atomic>
#include <cstdint>

namespace uniep {

// Release: what the caller wrote before is visible to whoever then reads the value with acquire.
inline void raise(std::uint64_t* word, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*word).store(value, std::memory_order_release);
}

[[nodiscard]] inline std::uint64_t read_acquire(std::uint64_t* word) {
  return std::atomic_ref<std::uint64_t>(*word).load(std::memory_order_acquire);
}

}  // namespace uniep
