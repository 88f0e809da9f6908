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

// Rows and columns of the register block.
constexpr std::int64_t kPanelM = 6;
constexpr std::int64_t kPanelN = 16;
constexpr std::int64_t kWidePanelM = 12;  // AVX-512: 24 of its 32 registers accumulate
constexpr std::int64_t kWidePanelN = 32;
constexpr std::int64_t kBlockK = 256;   // a panel of b is 16 or 32 KiB, within L1
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
#define UNIEP_AVX512 __attribute__((target("avx512f")))

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
// reach past its kLines columns: what lies there must be written later.
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
  const std::int64_t whole = (stride == 1 || k_stride == 1) ? count / kWidth * kWidth : 0;
  for (std::int64_t first = 0; first < whole; first += kWidth, out += k * kWidth) {
    const S* source = data + first * stride;
    if (stride == 1) {
      for (std::int64_t p = 0; p < k; ++p) {
        for (std::int64_t i = 0; i < kWidth; ++i) {
          out[p * kWidth + i] = widen(source[p * k_stride + i]);
        }
      }
    } else {
      // The last columns first: their stores reach into the next row's first ones.
      constexpr std::int64_t kRest = kWidth % 8;
      if constexpr (kRest > 0) {
        pack_lines<kWidth, kRest>(source + (kWidth - kRest) * stride, stride, k,
                                  out + kWidth - kRest);
      }
      for (std::int64_t i = 0; i + 8 <= kWidth; i += 8) {
        pack_lines<kWidth, 8>(source + i * stride, stride, k, out + i);
      }
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

UNIEP_AVX512 void kernel_avx512(const float* a, const float* b, std::int64_t k, float* c,
                                std::int64_t ldc, bool first) {
  __m512 acc[kWidePanelM][2];
#pragma GCC unroll 12
  for (int i = 0; i < kWidePanelM; ++i) {
    acc[i][0] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * ldc);
    acc[i][1] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * ldc + 16);
  }
  for (std::int64_t p = 0; p < k; ++p) {
    const __m512 b0 = _mm512_loadu_ps(b + p * kWidePanelN);
    const __m512 b1 = _mm512_loadu_ps(b + p * kWidePanelN + 16);
#pragma GCC unroll 12
    for (int i = 0; i < kWidePanelM; ++i) {
      const __m512 x = _mm512_set1_ps(a[p * kWidePanelM + i]);
      acc[i][0] = _mm512_fmadd_ps(x, b0, acc[i][0]);
      acc[i][1] = _mm512_fmadd_ps(x, b1, acc[i][1]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kWidePanelM; ++i) {
    _mm512_storeu_ps(c + i * ldc, acc[i][0]);
    _mm512_storeu_ps(c + i * ldc + 16, acc[i][1]);
  }
}
#endif

using Kernel = void (*)(const float* a, const float* b, std::int64_t k, float* c, std::int64_t ldc,
                        bool first);
template <typename S>
using Pack = void (*)(const S* data, std::int64_t stride, std::int64_t k_stride, std::int64_t count,
                      std::int64_t k, float* out);

// A register block with what packs for it and multiplies it.
template <typename S>
struct Block {
  std::int64_t m, n;
  Pack<S> pack_a, pack_b;
  Kernel kernel;
};

template <typename S>
Block<S> block_of(InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::avx512) {
    return {kWidePanelM, kWidePanelN, pack_avx2<kWidePanelM, S>, pack_avx2<kWidePanelN, S>,
            kernel_avx512};
  }
  if (set == InstructionSet::avx2) {
    return {kPanelM, kPanelN, pack_avx2<kPanelM, S>, pack_avx2<kPanelN, S>, kernel_avx2};
  }
#endif
  static_cast<void>(set);
  return {kPanelM, kPanelN, pack_generic<kPanelM, S>, pack_generic<kPanelN, S>, kernel_generic};
}

// A block of c that is smaller than the kernel's goes through a full one.
template <typename S>
void run_edge(const Block<S>& block, const float* a, const float* b, std::int64_t k, std::int64_t m,
              std::int64_t n, float* c, std::int64_t ldc, bool first) {
  alignas(64) float whole[kWidePanelM * kWidePanelN] = {};
  const std::size_t bytes = static_cast<std::size_t>(n) * sizeof(float);
  for (std::int64_t i = 0; i < m && !first; ++i) {
    std::memcpy(whole + i * block.n, c + i * ldc, bytes);
  }
  block.kernel(a, b, k, whole, block.n, first);
  for (std::int64_t i = 0; i < m; ++i) std::memcpy(c + i * ldc, whole + i * block.n, bytes);
}

std::int64_t round_up(std::int64_t value, std::int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> sets = [] {
    std::vector<InstructionSet> all{InstructionSet::generic};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      all.push_back(InstructionSet::avx2);
      if (__builtin_cpu_supports("avx512f")) all.push_back(InstructionSet::avx512);
    }
#endif
    return all;
  }();
  return sets;
}

std::string to_string(InstructionSet set) {
  switch (set) {
    case InstructionSet::generic:
      return "generic";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
  }
  return "unknown";
}

template <typename S>
void gemm_tile(MatrixView<S> a, MatrixView<S> b, std::int64_t m, std::int64_t n, std::int64_t k,
               float* c, std::int64_t ldc, GemmScratch& scratch, InstructionSet set) {
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
  const Block<S> block = block_of<S>(set);
  grow(scratch.a, round_up(m, block.m) * block_k + kPackSlack);
  grow(scratch.b, round_up(n, block.n) * block_k + kPackSlack);
  for (std::int64_t p = 0; p < k; p += kBlockK) {
    const std::int64_t depth = std::min(kBlockK, k - p);
    block.pack_a(a.data + p * a.col_stride, a.row_stride, a.col_stride, m, depth, scratch.a.data());
    block.pack_b(b.data + p * b.row_stride, b.col_stride, b.row_stride, n, depth, scratch.b.data());
    for (std::int64_t j = 0; j < n; j += block.n) {
      for (std::int64_t i = 0; i < m; i += block.m) {
        const float* pa = scratch.a.data() + i * depth;
        const float* pb = scratch.b.data() + j * depth;
        float* corner = c + i * ldc + j;
        if (m - i >= block.m && n - j >= block.n) {
          block.kernel(pa, pb, depth, corner, ldc, p == 0);
        } else {
          run_edge(block, pa, pb, depth, std::min(block.m, m - i), std::min(block.n, n - j), corner,
                   ldc, p == 0);
        }
      }
    }
  }
}

template void gemm_tile<float>(MatrixView<float>, MatrixView<float>, std::int64_t, std::int64_t,
                               std::int64_t, float*, std::int64_t, GemmScratch&, InstructionSet);
template void gemm_tile<Bf16>(MatrixView<Bf16>, MatrixView<Bf16>, std::int64_t, std::int64_t,
                              std::int64_t, float*, std::int64_t, GemmScratch&, InstructionSet);

}  // namespace uniep::cpu
