// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same on every platform. SplitMix64 (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", OOPSLA 2014) read as a counter-based generator: draw
// i is a fixed mix of key + (i + 1) * gamma, so any draw can be reached directly and threads can
// share one sequence. No libm anywhere. Not for secrets.
#pragma once

#include <cstdint>

namespace uniep {

class Rng {
 public:
  // Draws one normal() takes; normal number n of a stream begins at draw n * kDrawsPerNormal.
  static constexpr std::uint64_t kDrawsPerNormal = 3;

  // Streams of one seed are independent for practical purposes.
  explicit constexpr Rng(std::uint64_t seed, std::uint64_t stream = 0) noexcept
      : key_(mix(mix(seed + kGamma) + (stream + 1) * kGamma)) {}

  // The next draw will be number `counter` of the stream, from 0.
  constexpr void seek(std::uint64_t counter) noexcept { counter_ = counter; }

  // 64 uniform bits.
  constexpr std::uint64_t next() noexcept { return mix(key_ + ++counter_ * kGamma); }

  // In [0, 1), a multiple of 2^-53.
  constexpr double uniform01() noexcept { return static_cast<double>(next() >> 11) * 0x1p-53; }

  // In [0, n), each value equally likely; n must not be 0.
  constexpr std::uint64_t below(std::uint64_t n) noexcept {
    const std::uint64_t rejected = (0 - n) % n;  // 2^64 mod n: these draws would favour low values
    std::uint64_t draw = next();
    while (draw < rejected) draw = next();
    return draw % n;
  }

  // Close to N(0, 1): twelve 16-bit uniforms added (Irwin-Hall), centred and divided by 2^16. The
  // variance is 1 - 2^-32, every value lies within +-6, is a multiple of 2^-16 and exact in fp32.
  constexpr float normal() noexcept {
    std::int32_t sum = -12 * 65535 / 2;
    for (std::uint64_t i = 0; i < kDrawsPerNormal; ++i) {
      const std::uint64_t draw = next();
      for (int shift = 0; shift < 64; shift += 16) {
        sum += static_cast<std::int32_t>((draw >> shift) & 0xFFFFU);
      }
    }
    return static_cast<float>(sum) * 0x1p-16F;
  }

 private:
  static constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15U;  // 2^64 / golden ratio, odd

  static constexpr std::uint64_t mix(std::uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
    return z ^ (z >> 31);
  }

  std::uint64_t key_;
  std::uint64_t counter_ = 0;
};

}  // namespace uniep
