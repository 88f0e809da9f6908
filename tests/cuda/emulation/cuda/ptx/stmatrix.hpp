// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/stmatrix.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "hopper.hpp"

namespace uniep::cuda::ptx {

inline void stmatrix_x4(std::uint32_t address, const std::uint32_t (&r)[4]) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint64_t* const rows = emulation::gather_warp(address);
  for (unsigned i = 0; i < 4; ++i) {
    const auto row = static_cast<std::uint32_t>(rows[8 * i + lane / 4]);
    std::memcpy(emulation::shared_at(row, 16, 16) + 4 * (lane % 4), &r[i], 4);
  }
}

inline void stmatrix_x4_trans(std::uint32_t address, const std::uint32_t (&r)[4]) {
  const unsigned lane = threadIdx.x % 32;
  const std::uint64_t* const rows = emulation::gather_warp(address);
  for (unsigned i = 0; i < 4; ++i) {
    for (unsigned half = 0; half < 2; ++half) {
      const auto row = static_cast<std::uint32_t>(rows[8 * i + 2 * (lane % 4) + half]);
      const auto value = static_cast<std::uint16_t>(r[i] >> 16 * half);
      std::memcpy(emulation::shared_at(row, 16, 16) + lane / 4 * 2, &value, 2);
    }
  }
}

inline void store_shared(std::uint32_t address, float value) {
  std::memcpy(emulation::shared_at(address, 4, 4), &value, 4);
}
inline void store_shared(std::uint32_t address, float first, float second) {
  const float both[2] = {first, second};
  std::memcpy(emulation::shared_at(address, 8, 8), both, 8);
}
inline uint4 load_shared_16(std::uint32_t address) {
  uint4 value;
  std::memcpy(&value, emulation::shared_at(address, 16, 16), 16);
  return value;
}

}  // namespace uniep::cuda::ptx
