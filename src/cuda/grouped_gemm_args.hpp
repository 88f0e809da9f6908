// SPDX-License-Identifier: Apache-2.0
// What the host hands to the grouped GEMM kernel: a table of problems over one set of experts.
//
// Every operation is D[m, n] = sum over k of A[m, k] B[n, k], tile by tile:
//   fprop  m = rows of w      n = token rows   k = columns of w and x
//   dgrad  m = columns of w   n = token rows   k = rows of w, columns of d_y
//   wgrad  m = rows of d_w    n = columns of d_w   k = token rows
// Token rows lie on n, which WGMMA cuts in steps of 8, so that a short expert wastes at most 31.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/operand.hpp"

namespace uniep::cuda {

inline constexpr int kTileM = 128;  // per block: two warpgroups of 64
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;       // one swizzled row of 128 bytes
inline constexpr int kMaxProblems = 4;  // rows of the table
inline constexpr int kMaxGroups = 512;  // problems times local experts

enum class Epilogue {
  rows_bf16,    // token rows [rows, m], bf16
  rows_f32,     // token rows [rows, m], fp32
  rows_swiglu,  // a [rows, m / 2] and, if asked, h [rows, m], bf16
  rows_home,    // token rows [rows, m], bf16, each to where its Context says
  grad_bf16,    // [m, n] of each expert, bf16
  grad_f32,     // [m, n] of each expert, fp32, stored or added
};

// What a kernel is compiled for.
struct KernelConfig {
  ptx::Major a;
  ptx::Major b;
  Epilogue epilogue;

  [[nodiscard]] constexpr bool rows_on_n() const {
    return epilogue != Epilogue::grad_bf16 && epilogue != Epilogue::grad_f32;
  }
};

inline constexpr KernelConfig kFprop{ptx::Major::k, ptx::Major::k, Epilogue::rows_bf16};
inline constexpr KernelConfig kFpropSwiglu{ptx::Major::k, ptx::Major::k, Epilogue::rows_swiglu};
inline constexpr KernelConfig kFpropHome{ptx::Major::k, ptx::Major::k, Epilogue::rows_home};
inline constexpr KernelConfig kDgrad{ptx::Major::mn, ptx::Major::k, Epilogue::rows_bf16};
inline constexpr KernelConfig kDgradF32{ptx::Major::mn, ptx::Major::k, Epilogue::rows_f32};
inline constexpr KernelConfig kWgrad{ptx::Major::mn, ptx::Major::mn, Epilogue::grad_bf16};
inline constexpr KernelConfig kWgradF32{ptx::Major::mn, ptx::Major::mn, Epilogue::grad_f32};

// A row of the table.
struct Problem {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap d;             // not for rows_swiglu and rows_home
  void* out;                 // rows_swiglu: a
  void* h;                   // rows_swiglu: nullptr if not wanted
  const float* row_weights;  // rows_swiglu: [capacity], the top-k weight of each row
  int m_extent;
  int n_extent;  // grad_*: columns of d; otherwise each expert's rows
  int k_extent;  // rows_*: columns of the rows; otherwise each expert's rows
  int add;       // grad_f32: add to d instead of storing
  int band;      // n tiles that are walked together, for the L2 cache
};

struct KernelArgs {
  Problem problems[kMaxProblems];
  const std::int64_t* expert_starts;  // [num_experts], multiples of 64
  const std::int64_t* expert_rows;    // [num_experts]
  std::uint32_t* tickets;             // counter of drawn tickets, or nullptr for a fixed stride
  int num_problems;
  int num_experts;
};

}  // namespace uniep::cuda
