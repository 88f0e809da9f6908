// SPDX-License-Identifier: Apache-2.0
// FNV-1a, 64 bits (Fowler, Noll, Vo): names a run of bytes in tables and logs; not for security.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace uniep {

[[nodiscard]] inline std::uint64_t fnv1a(std::span<const std::byte> bytes,
                                         std::uint64_t state = 0xcbf29ce484222325ULL) {
  for (const std::byte b : bytes) {
    state = (state ^ static_cast<std::uint64_t>(b)) * 0x100000001b3ULL;
  }
  return state;
}

}  // namespace uniep
