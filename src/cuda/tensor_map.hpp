// SPDX-License-Identifier: Apache-2.0
// Tensor maps for bulk copies: a base address, extents, pitches, a box and a swizzle.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace uniep::cuda {

enum class MapElement { bf16, f32 };

struct TensorMapSpec {
  const void* base = nullptr;  // multiple of 16 bytes
  MapElement element = MapElement::bf16;
  int rank = 3;
  std::array<std::uint64_t, 5> extents{};  // elements, innermost first
  std::array<std::uint64_t, 5> pitches{};  // elements from one index of dimension i to the next;
                                           // [0] is 1; bytes must be a multiple of 16
  std::array<std::uint32_t, 5> box{};      // elements; box[0] spans the swizzled row
  int swizzle_bytes = 128;                 // 64 or 128
};

// Errors: world if the driver lacks tensor maps or refuses the specification.
[[nodiscard]] CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace uniep::cuda
