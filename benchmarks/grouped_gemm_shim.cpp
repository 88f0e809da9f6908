// SPDX-License-Identifier: Apache-2.0
// run_grouped_gemm for ctypes, so that grouped_gemm_cuda.py can time it beside PyTorch's products
// in one process. Not an interface of the project.
#include <cstring>

#include "base/error.hpp"
#include "cuda/grouped_gemm.hpp"

using uniep::cuda::ElementType;
using uniep::cuda::GemmOp;

// One problem; `op` counts fprop, fprop_swiglu, dgrad, wgrad from 0. Returns nullptr, or the
// error's text, valid until this thread's next call.
extern "C" __attribute__((visibility("default"))) const char* uniep_grouped_gemm(
    int op, int f32_out, int accumulate, const std::int64_t* starts, const std::int64_t* rows,
    int num_experts, std::int64_t capacity, std::int64_t n, std::int64_t k, const void* x,
    const void* d_y, const void* w, void* out, void* h, const float* row_weights, void* stream,
    int num_sms, int band, std::uint32_t* tickets) {
  thread_local char text[512];
  const uniep::cuda::GroupedGemm problem{.n = n,
                                         .k = k,
                                         .x = x,
                                         .d_y = d_y,
                                         .w = w,
                                         .out = out,
                                         .h = h,
                                         .row_weights = row_weights,
                                         .accumulate = accumulate != 0};
  try {
    uniep::cuda::run_grouped_gemm(static_cast<GemmOp>(op), ElementType::bf16,
                                  f32_out != 0 ? ElementType::f32 : ElementType::bf16,
                                  {starts, rows, num_experts, capacity}, {&problem, 1},
                                  {static_cast<cudaStream_t>(stream), num_sms, band, tickets});
  } catch (const std::exception& error) {
    std::strncpy(text, error.what(), sizeof(text) - 1);
    return text;
  }
  return nullptr;
}
