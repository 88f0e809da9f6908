// SPDX-License-Identifier: Apache-2.0
// How a matrix operand lies in shared memory, and how WGMMA is told. For host and device.
//
// With the 128-byte swizzle, in boxes of 64 rows of 128 bytes (8 KiB, aligned to 1 KiB): K-major
// boxes hold 64 values of m or n, each with 64 values of k; MN-major boxes hold 64 values of k,
// each with 64 values of m or n.
#pragma once

#include <cstdint>

namespace uniep::cuda::ptx {

enum class Major { k, mn };  // which index is contiguous

inline constexpr int kBoxBytes = 8192;

// Describes an operand that starts at `address`, in boxes that follow each other. The strides
// between 8-row groups (1 KiB) and between boxes are those of the layout above for both majors;
// K-major operands ignore the second.
constexpr std::uint64_t wgmma_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1;
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) |
         (static_cast<std::uint64_t>(kBoxBytes >> 4) << 16) |
         (static_cast<std::uint64_t>(1024 >> 4) << 32) | (kSwizzle128 << 62);
}

// What a step of 16 in k adds to a descriptor: 32 bytes along a swizzled row, or 16 rows.
template <Major kMajor>
inline constexpr std::uint64_t kDescriptorStep = kMajor == Major::k ? 32 >> 4 : 16 * 128 >> 4;

}  // namespace uniep::cuda::ptx
