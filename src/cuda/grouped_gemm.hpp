// SPDX-License-Identifier: Apache-2.0
// Grouped GEMM over the rows of local experts on one Hopper GPU: forward, data gradient, weight
// gradient. The host knows no row counts: expert_rows and expert_starts are read on the device.
//
// Rows live in expert-major buffers. Expert e owns rows [starts[e], starts[e] + rows[e]); starts
// are multiples of 64; the rows between an expert's last and the next multiple of 64 are its
// padding. As an operand of a weight gradient, padding must hold zeros; everywhere else its
// contents are ignored. An output's padding is written with zeros; rows beyond it are not touched.
//
// An element is one chain of k16 products in one fp32 accumulator from +0, k ascending, rounded
// once to the output type. Its bits depend on its operands and the length of the chain, and on
// nothing in GemmLaunch, on no other row, and on no other problem.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>

namespace uniep::cuda {

enum class GemmOp {
  fprop,         // out [capacity, n] = x [capacity, k] * w [E_l, n, k]^T
  fprop_swiglu,  // the same into h [capacity, n], n = 2 * ffn, gate rows of w before up rows; then
                 // out [capacity, ffn] = silu(gate) * up * row_weights
  dgrad,         // out [capacity, k] = d_y [capacity, n] * w [E_l, n, k]
  wgrad,         // out [E_l, n, k] = d_y [rows of e, n]^T * x [rows of e, k] for each expert e
};

enum class ElementType { bf16, f32, f16, f8_e4m3 };

// Device memory, except the counts.
struct ExpertRows {
  const std::int64_t* starts = nullptr;  // [num_experts]
  const std::int64_t* rows = nullptr;    // [num_experts]
  int num_experts = 0;                   // local experts
  std::int64_t capacity = 0;             // rows of every row buffer, a multiple of 64
};

// One row of the problem table. Pointers are device memory on 16-byte boundaries; all matrices are
// row-major and dense. Which pointers an op reads follows from its line in GemmOp.
struct GroupedGemm {
  std::int64_t n = 0;  // multiples of 8; n of 16 for fprop_swiglu
  std::int64_t k = 0;
  const void* x = nullptr;
  const void* d_y = nullptr;
  const void* w = nullptr;
  void* out = nullptr;
  void* h = nullptr;                   // fprop_swiglu: nullptr if not wanted
  const float* row_weights = nullptr;  // fprop_swiglu: [capacity]
  bool accumulate = false;             // wgrad into f32: add to out, once
};

struct GemmLaunch {
  cudaStream_t stream = nullptr;
  int num_sms = 0;  // at most; 0 takes all. Blocks come in clusters of two
  int band = 8;     // n tiles that are walked together, for the L2 cache; changes no bits
  // A counter in device memory from which clusters draw their tiles: 0 before a launch, and 0 again
  // after it, so that launches that follow each other can share it, graph replays included. Without
  // one each cluster takes tiles in a fixed stride, which is slower where experts differ in rows.
  // Changes no bits.
  std::uint32_t* tickets = nullptr;
};

// All problems of one call share op, types and experts, and are one launch. Operands are bf16; out
// is bf16, or f32 for dgrad and wgrad. Asynchronous in launch.stream; outputs must not overlap.
// Errors: invalid_argument before anything is launched, naming the value and what is valid; world
// if CUDA refuses.
void run_grouped_gemm(GemmOp op, ElementType operand_type, ElementType out_type,
                      const ExpertRows& experts, std::span<const GroupedGemm> problems,
                      const GemmLaunch& launch);

}  // namespace uniep::cuda
