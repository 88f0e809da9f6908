// SPDX-License-Identifier: Apache-2.0
// One tile of a matrix product on the CPU. Contract: every element is one chain of fused
// multiply-adds, acc = fma(a, b, acc), from +0 with k ascending. Bits therefore depend on k alone,
// never on the tile, the instruction set or the neighbours, and equal a plain loop of std::fma.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "uniep/bf16.hpp"

namespace uniep::cpu {

// A matrix by strides in elements: element (i, j) is data[i * row_stride + j * col_stride].
template <typename S>
struct MatrixView {
  const S* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

// A worker's scratch for packed operands; grows to what was asked and is then reused.
struct GemmScratch {
  std::vector<float> a;
  std::vector<float> b;
};

enum class InstructionSet { generic, avx2, avx512 };

// What this machine can run, the fastest last; bits are those of a plain loop with any of them.
[[nodiscard]] const std::vector<InstructionSet>& instruction_sets();
[[nodiscard]] inline InstructionSet best_instruction_set() { return instruction_sets().back(); }
[[nodiscard]] std::string to_string(InstructionSet set);

// c [m, n] (row stride ldc, float) = a [m, k] · b [k, n]; c is overwritten; k = 0 gives +0.
template <typename S>
void gemm_tile(MatrixView<S> a, MatrixView<S> b, std::int64_t m, std::int64_t n, std::int64_t k,
               float* c, std::int64_t ldc, GemmScratch& scratch,
               InstructionSet set = best_instruction_set());

extern template void gemm_tile<float>(MatrixView<float>, MatrixView<float>, std::int64_t,
                                      std::int64_t, std::int64_t, float*, std::int64_t,
                                      GemmScratch&, InstructionSet);
extern template void gemm_tile<Bf16>(MatrixView<Bf16>, MatrixView<Bf16>, std::int64_t, std::int64_t,
                                     std::int64_t, float*, std::int64_t, GemmScratch&,
                                     InstructionSet);

}  // namespace uniep::cpu
