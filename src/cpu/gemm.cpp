// SPDX-License-Identifier: Apache-2.0
// Packed panels and a register-blocked inner kernel (Goto and van de Geijn, "Anatomy of
// High-Performance Matrix Multiplication", 2008). The accumulators of a k block are stored to c in
// full precision and loaded again for the next one, which leaves the chain as it is.
#include "cpu/gemm.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/formulas.hpp"

namespace uniep::cpu {
namespace {

constexpr std::int64_t kPanelM = 6;     // rows of the register block
constexpr std::int64_t kPanelN = 16;    // columns of the register block
constexpr std::int64_t kBlockK = 256;   // a panel of b is 16 KiB, half of L1
constexpr std::int64_t kPackSlack = 8;  // floats that packing may write past the last panel

// Panels of kWidth along i: out[panel][k][kWidth], zero-filled beyond `count`. May write up to
// kPackSlack floats past the last panel.
template <std::int64_t kWidth, typename S>
void pack_generic(const S* data, std::int64_t stride, std::int64_t k_stride, std::int64_t count,
                  std::int64_t k, float* out) {
  for (std::int64_t first = 0; first < count; first += kWidth, out += k * kWidth) {
    const std::int64_t live = std::min(kWidth, count - first);
    const S* source = data + first * stride;
    if (live < kWidth) std::fill(out, out + k * kWidth, 0.0F);
    for (std::int64_t p = 0; p < k; ++p) {
      for (std::int64_t i = 0; i < live; ++i) {
        out[p * kWidth + i] = widen(source[p * k_stride + i * stride]);
      }
    }
  }
}

// c, a block [6, 16] with row stride ldc, is continued unless `first`.
void kernel_generic(const float* a, const float* b, std::int64_t k, float* c, std::int64_t ldc,
                    bool first) {
  for (std::int64_t i = 0; i < kPanelM; ++i) {
    for (std::int64_t j = 0; j < kPanelN; ++j) {
      float acc = first ? 0.0F : c[i * ldc + j];
      for (std::int64_t p = 0; p < k; ++p) {
        acc = std::fma(a[p * kPanelM + i], b[p * kPanelN + j], acc);
      }
      c[i * ldc + j] = acc;
    }
  }
}

#if defined(__x86_64__)
#define UNIEP_AVX2 __attribute__((target("avx2,fma")))

UNIEP_AVX2 inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
UNIEP_AVX2 inline __m256 load8(const Bf16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

UNIEP_AVX2 inline void transpose8(__m256 (&r)[8]) {
  __m256 t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 low = r[i];
    const __m256 high = r[i + 4];
    r[i] = _mm256_permute2f128_ps(low, high, 0x20);
    r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

// Lines [0, kLines) of `source`, k elements each, become columns of out[k][kWidth]. A store may
// reach past its kLines columns: what lies there is written later.
template <std::int64_t kWidth, int kLines, typename S>
UNIEP_AVX2 inline void pack_lines(const S* source, std::int64_t stride, std::int64_t k,
                                  float* out) {
  std::int64_t p = 0;
  for (; p + 8 <= k; p += 8) {
    __m256 r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      r[i] = i < kLines ? load8(source + i * stride + p) : _mm256_setzero_ps();
    }
    transpose8(r);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) _mm256_storeu_ps(out + (p + i) * kWidth, r[i]);
  }
  for (; p < k; ++p) {
    for (int i = 0; i < kLines; ++i) out[p * kWidth + i] = widen(source[i * stride + p]);
  }
}

template <std::int64_t kWidth, typename S>
UNIEP_AVX2 void pack_avx2(const S* data, std::int64_t stride, std::int64_t k_stride,
                          std::int64_t count, std::int64_t k, float* out) {
  static_assert(kWidth == kPanelM || kWidth == kPanelN);
  const std::int64_t whole = (stride == 1 || k_stride == 1) ? count / kWidth * kWidth : 0;
  for (std::int64_t first = 0; first < whole; first += kWidth, out += k * kWidth) {
    const S* source = data + first * stride;
    if (stride == 1) {
      for (std::int64_t p = 0; p < k; ++p) {
        for (std::int64_t i = 0; i < kWidth; ++i) {
          out[p * kWidth + i] = widen(source[p * k_stride + i]);
        }
      }
    } else if constexpr (kWidth == kPanelN) {
      pack_lines<kWidth, 8>(source, stride, k, out);
      pack_lines<kWidth, 8>(source + 8 * stride, stride, k, out + 8);
    } else {
      pack_lines<kWidth, kPanelM>(source, stride, k, out);
    }
  }
  pack_generic<kWidth>(data + whole * stride, stride, k_stride, count - whole, k, out);
}

UNIEP_AVX2 void kernel_avx2(const float* a, const float* b, std::int64_t k, float* c,
                            std::int64_t ldc, bool first) {
  __m256 acc[kPanelM][2];
#pragma GCC unroll 6
  for (int i = 0; i < kPanelM; ++i) {
    acc[i][0] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(c + i * ldc);
    acc[i][1] = first ? _mm256_setzero_ps() : _mm256_loadu_ps(c + i * ldc + 8);
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
    _mm256_storeu_ps(c + i * ldc, acc[i][0]);
    _mm256_storeu_ps(c + i * ldc + 8, acc[i][1]);
  }
}
#endif

bool has_avx2() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has;
#else
  return false;
#endif
}

using Kernel = void (*)(const float* a, const float* b, std::int64_t k, float* c, std::int64_t ldc,
                        bool first);
template <typename S>
using Pack = void (*)(const S* data, std::int64_t stride, std::int64_t k_stride, std::int64_t count,
                      std::int64_t k, float* out);

// What the processor can do, chosen once a tile.
template <typename S>
struct Functions {
  Pack<S> pack_a = pack_generic<kPanelM, S>;
  Pack<S> pack_b = pack_generic<kPanelN, S>;
  Kernel kernel = kernel_generic;
};

template <typename S>
Functions<S> functions() {
#if defined(__x86_64__)
  if (has_avx2()) return {pack_avx2<kPanelM, S>, pack_avx2<kPanelN, S>, kernel_avx2};
#endif
  return {};
}

// A block of c that is smaller than the kernel's goes through a full one.
void run_edge(Kernel kernel, const float* a, const float* b, std::int64_t k, std::int64_t m,
              std::int64_t n, float* c, std::int64_t ldc, bool first) {
  alignas(32) float block[kPanelM * kPanelN] = {};
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
  for (std::int64_t i = 0; i < m && !first; ++i) {
    std::memcpy(block + i * kPanelN, c + i * ldc, bytes);
  }
  kernel(a, b, k, block, kPanelN, first);
  for (std::int64_t i = 0; i < m; ++i) std::memcpy(c + i * ldc, block + i * kPanelN, bytes);
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
  const auto grow = [](std::vector<float>& buffer, std::int64_t floats) {
    if (buffer.size() < static_cast<std::size_t>(floats)) {
      buffer.resize(static_cast<std::size_t>(floats));
    }
  };
  grow(scratch.a, round_up(m, kPanelM) * block_k + kPackSlack);
  grow(scratch.b, round_up(n, kPanelN) * block_k + kPackSlack);
  const Functions<S> run = functions<S>();
  for (std::int64_t p = 0; p < k; p += kBlockK) {
    const std::int64_t depth = std::min(kBlockK, k - p);
    run.pack_a(a.data + p * a.col_stride, a.row_stride, a.col_stride, m, depth, scratch.a.data());
    run.pack_b(b.data + p * b.row_stride, b.col_stride, b.row_stride, n, depth, scratch.b.data());
    for (std::int64_t j = 0; j < n; j += kPanelN) {
      for (std::int64_t i = 0; i < m; i += kPanelM) {
        const float* pa = scratch.a.data() + i * depth;
        const float* pb = scratch.b.data() + j * depth;
        float* block = c + i * ldc + j;
        if (m - i >= kPanelM && n - j >= kPanelN) {
          run.kernel(pa, pb, depth, block, ldc, p == 0);
        } else {
          run_edge(run.kernel, pa, pb, depth, std::min(kPanelM, m - i), std::min(kPanelN, n - j),
                   block, ldc, p == 0);
        }
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
