// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/wgmma.hpp. Each CUDA thread computes its own elements from the
// swizzled operands, k ascending in fp32: the bits of a chain of fma, which are not those of a
// tensor core.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/operand.hpp"
#include "hopper.hpp"

namespace uniep::cuda::ptx {

// .sync.aligned: no lane goes on before all lanes of its warp are there.
inline void wgmma_fence() { emulation::gather_warp(0); }
inline void wgmma_commit() {
  emulation::gather_warp(0);
  emulation::commit_products();
}
template <int kPending>
void wgmma_wait() {
  emulation::wait_products(kPending);
  emulation::gather_warp(0);
}
template <int kCount>
void wgmma_pin(float (&)[128]) {}

// An operand of one instruction, as its descriptor says.
template <Major kMajor>
struct Operand {
  std::uint32_t start;
  std::uint32_t leading;  // MN-major: from 64 values of m or n to the next
  std::uint32_t stride;   // from eight rows of 128 bytes to the next
  const std::uint8_t* shared;

  Operand(std::uint64_t descriptor, std::uint32_t count)
      : start(static_cast<std::uint32_t>(descriptor & 0x3FFFU) << 4),
        leading(static_cast<std::uint32_t>(descriptor >> 16 & 0x3FFFU) << 4),
        stride(static_cast<std::uint32_t>(descriptor >> 32 & 0x3FFFU) << 4) {
    if (descriptor >> 62 != 1) emulation::fail("an operand of wgmma without the 128-byte swizzle");
    emulation::shared_at(swizzled(count - 1, 15) / 16 * 16, 16, 16);
    shared = emulation::shared_at(0, 0, 16);
  }

  [[nodiscard]] std::uint32_t swizzled(std::uint32_t mn, std::uint32_t k) const {
    const std::uint32_t address =
        kMajor == Major::k ? start + mn / 8 * stride + mn % 8 * 128 + k * 2
                           : start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
    return address ^ (address >> 7 & 7U) << 4;
  }

  [[nodiscard]] float get(std::uint32_t mn, std::uint32_t k) const {
    std::uint16_t bits;
    std::memcpy(&bits, shared + swizzled(mn, k), 2);
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
};

template <int kN, Major kA, Major kB>
struct Wgmma {
  static constexpr unsigned kK = 16;

  static void mma(float (&d)[128], std::uint64_t a, std::uint64_t b) {
    emulation::issue_product({&run, d, a, b, false, 0});
  }
  static void start(float (&d)[128], std::uint64_t a, std::uint64_t b) {
    emulation::issue_product({&run, d, a, b, true, 0});
  }

  static void run(float* d, std::uint64_t desc_a, std::uint64_t desc_b, bool is_first) {
    constexpr unsigned kColumns = kN / 4;  // of this thread, in pairs
    const unsigned warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const Operand<kA> a(desc_a, 64);
    const Operand<kB> b(desc_b, kN);
    float left[kK][2];
    float right[kK][kColumns];
    for (unsigned k = 0; k < kK; ++k) {
      for (unsigned i = 0; i < 2; ++i) left[k][i] = a.get(16 * warp + lane / 4 + 8 * i, k);
      for (unsigned c = 0; c < kColumns; ++c) {
        right[k][c] = b.get(8 * (c / 2) + 2 * (lane % 4) + c % 2, k);
      }
    }
    float sums[2][kColumns];
    for (unsigned i = 0; i < 2; ++i) {
      for (unsigned c = 0; c < kColumns; ++c) {
        sums[i][c] = is_first ? 0.0F : d[c / 2 * 4 + 2 * i + c % 2];
      }
      // The product of two bf16 values is exact, so this is fma.
      for (unsigned k = 0; k < kK; ++k) {
        for (unsigned c = 0; c < kColumns; ++c) sums[i][c] += left[k][i] * right[k][c];
      }
      for (unsigned c = 0; c < kColumns; ++c) d[c / 2 * 4 + 2 * i + c % 2] = sums[i][c];
    }
  }
};

}  // namespace uniep::cuda::ptx
