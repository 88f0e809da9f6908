// SPDX-License-Identifier: Apache-2.0
// bfloat16 as a storage type: the upper half of an fp32. Widening is exact; narrowing rounds to
// nearest, ties to even, overflows to infinity and keeps a NaN a (quiet) NaN with its sign.
#pragma once

#include <bit>
#include <cstdint>

namespace uniep {

struct Bf16 {
  std::uint16_t bits;
};
static_assert(sizeof(Bf16) == 2);

[[nodiscard]] constexpr float to_float(Bf16 value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

[[nodiscard]] constexpr Bf16 to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    // Rounding could carry a NaN's payload into infinity: truncate it and set the quiet bit.
    return Bf16{static_cast<std::uint16_t>((bits >> 16) | 0x0040U)};
  }
  // Just under half a step, plus one where the kept part is odd: a tie goes to the even neighbour.
  const std::uint32_t bias = 0x7FFFU + ((bits >> 16) & 1U);
  return Bf16{static_cast<std::uint16_t>((bits + bias) >> 16)};
}

}  // namespace uniep
