// SPDX-License-Identifier: Apache-2.0
// Launchers of the compiled kernels, one a translation unit so that they build side by side.
#pragma once

#include <cuda_runtime.h>

#include "cuda/grouped_gemm_args.hpp"

namespace uniep::cuda {

cudaError_t launch_fprop(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_fprop_swiglu(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_dgrad(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_dgrad_f32(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_wgrad(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_wgrad_f32(const KernelArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace uniep::cuda
