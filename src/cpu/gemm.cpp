// SPDX-License-Identifier: Apache-2.0
// Packed panels and a register-blocked inner kernel (Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008). The accumulators of a k block are stored to c in
// full precision and loaded again for the next one, which leaves the chain as it is.
#include "cpu/gemm.hpp"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/formulas.hpp"

namespace uniep::cpu {
namespace {

constexpr std::int64_t kPanelM = 6;     // rows of the register block
constexpr std::int64_t kPanelN = 16;    // columns of the register block
constexpr std::int64_t kBlockK = 256;   // a panel of b is 16 KiB, half of L1

// Panels of `width` along i: out[panel][k][width], zero-filled beyond `count`.
template <typename S>
void pack(const S* data, std::int64_t stride, std::int64_t k_stride, std::int64_t count,
          std::int64_t k, std::int64_t width, float* out) {
  for (std::int64_t first = 0; first < count; first += width) {
    const std::int64_t live = std::min(width, count - first);
    const S* source = data + first * stride;
    if (stride == 1) {
      for (std::int64_t p = 0; p < k; ++p, out += width) {
        for (std::int64_t i = 0; i < live; ++i) out[i] = widen(source[p * k_stride + i]);
        for (std::int64_t i = live; i < width; ++i) out[i] = 0.0F;
      }
      continue;
    }
    if (live < width) std::fill(out, out + k * width, 0.0F);
    for (std::int64_t i = 0; i < live; ++i) {
      const S* line = source + i * stride;
      for (std::int64_t p = 0; p < k; ++p) out[p * width + i] = widen(line[p * k_stride]);
    }
    out += k * width;
  }
}

using Kernel = void (*)(const float* a, const float* b, std::int64_t k, float* c, bool first);

// block [6, 16] of c, continued from c unless `first`.
void kernel_generic(const float* a, const float* b, std::int64_t k, float* c, bool first) {
  for (std::int64_t i = 0; i < kPanelM; ++i) {
    for (std::int64_t j = 0; j < kPanelN; ++j) {
      float acc = first ? 0.0F : c[i * kPanelN + j];
      for (std::int64_t p = 0; p < k; ++p) {
        acc = std::fma(a[p * kPanelM + i], b[p * kPanelN + j], acc);
      }
      c[i * kPanelN + j] = acc;
    }
  }
}

__attribute__((target("avx2,fma"))) void kernel_avx2(const float* a, const float* b, std::int64_t k,
                                                     float* c, bool first) {
  __m256 acc[kPanelM][2];
#pragma GCC unroll 6
  for (int i = 0; i < kPanelM; ++i) {
    acc[i][0] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(c + i * kPanelN);
    acc[i][1] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(c + i * kPanelN + 8);
  }
  for (std::int64_t p = 0; p < k; ++p) {
    const __m256 b0 = _mm256_loadu_ps(b + p * kPanelN);
    const __m256 b1 = _mm256_loadu_ps(b + p * kPanelN + 8);
#pragma GCC unroll 6
    for (int i = 0; i < kPanelM; ++i) {
      const __m256 x = _mm256_broadcast_ss(a + p * kPanelM + i);
      acc[i][0] = _mm256_fmadd_ps(x, b0, acc[i][0]);
      acc[i][1] = _mm256_fmadd_ps(x, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < kPanelM; ++i) {
    _mm256_storeu_ps(c + i * kPanelN, acc[i][0]);
    _mm256_storeu_ps(c + i * kPanelN + 8, acc[i][1]);
  }
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
}

void run_block(Kernel kernel, const float* a, const float* b, std::int64_t k, std::int64_t m,
               std::int64_t n, float* c, std::int64_t ldc, bool first) {
  alignas(32) float block[kPanelM * kPanelN];
  if (!first) {
    for (std::int64_t i = 0; i < m; ++i) {
      std::memcpy(block + i * kPanelN, c + i * ldc, static_cast<std::size_t>(n) * sizeof(float));
      std::fill(block + i * kPanelN + n, block + (i + 1) * kPanelN, 0.0F);
    }
    std::fill(block + m * kPanelN, block + kPanelM * kPanelN, 0.0F);
  }
  kernel(a, b, k, block, first);
  for (std::int64_t i = 0; i < m; ++i) {
    std::memcpy(c + i * ldc, block + i * kPanelN, static_cast<std::size_t>(n) * sizeof(float));
  }
}

std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

template <typename S>
void gemm_tile(MatrixView<S> a, MatrixView<S> b, std::int64_t m, std::int64_t n, std::int64_t k,
               float* c, std::int64_t ldc, GemmScratch& scratch) {
  if (k == 0) {
    for (std::int64_t i = 0; i < m; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0F);
    return;
  }
  const std::int64_t block_k = std::min(k, kBlockK);
  scratch.a.resize(std::max(scratch.a.size(),
                            static_cast<std::size_t>(round_up(m, kPanelM) * block_k)));
  scratch.b.resize(std::max(scratch.b.size(),
                            static_cast<std::size_t>(round_up(n, kPanelN) * block_k)));
  const Kernel kernel = has_avx2() ? kernel_avx2 : kernel_generic;
  for (std::int64_t p = 0; p < k; p += kBlockK) {
    const std::int64_t depth = std::min(kBlockK, k - p);
    pack(a.data + p * a.col_stride, a.row_stride, a.col_stride, m, depth, kPanelM,
         scratch.a.data());
    pack(b.data + p * b.row_stride, b.col_stride, b.row_stride, n, depth, kPanelN,
         scratch.b.data());
    for (std::int64_t j = 0; j < n; j += kPanelN) {
      for (std::int64_t i = 0; i < m; i += kPanelM) {
        run_block(kernel, scratch.a.data() + i * depth, scratch.b.data() + j * depth, depth,
                  std::min(kPanelM, m - i), std::min(kPanelN, n - j), c + i * ldc + j, ldc, p == 0);
      }
    }
  }
}

template void gemm_tile<float>(MatrixView<float>, MatrixView<float>, std::int64_t, std::int64_t,
                               std::int64_t, float*, std::int64_t, GemmScratch&);
template void gemm_tile<Bf16>(MatrixView<Bf16>, MatrixView<Bf16>, std::int64_t, std::int64_t,
                              std::int64_t, float*, std::int64_t, GemmScratch&);

std::string gemm_instruction_set() { return has_avx2() ? "avx2" : "generic"; }

}  // namespace uniep::cpu
