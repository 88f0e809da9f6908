// SPDX-License-Identifier: Apache-2.0
// What the files of a build with CUDA share. Unlike backend.hpp it names CUDA.
#pragma once

#include <cuda_runtime.h>

#include "base/error.hpp"
#include "cuda/backend.hpp"
#include "layer/cuda/run_case.hpp"

namespace uniep::tools {

#ifdef UNIEP_CUDA_EMULATED
inline constexpr bool kIsEmulated = true;
#else
inline constexpr bool kIsEmulated = false;
#endif

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_world("{}: {}", what, cudaGetErrorString(error));
}

// With tensor cores for bf16 where they are.
[[nodiscard]] CudaRunOptions to_run_options(const Case& data, const CudaOptions& options);

}  // namespace uniep::tools
