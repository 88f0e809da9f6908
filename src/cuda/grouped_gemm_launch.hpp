// SPDX-License-Identifier: Apache-2.0
// Launchers of the compiled kernels, one a translation unit so that they build side by side.
#pragma once

#include <cuda_runtime.h>

#include <span>

#include "cuda/grouped_gemm.hpp"
#include "cuda/grouped_gemm_args.hpp"

namespace uniep::cuda {

// What run_grouped_gemm checks and launches; fused kernels launch the same table themselves.
[[nodiscard]] KernelArgs make_kernel_args(GemmOp op, ElementType operand_type, ElementType out_type,
                                          const ExpertRows& experts,
                                          std::span<const GroupedGemm> problems, int band,
                                          std::uint32_t* tickets);
// Blocks for a launch on `wanted` SMs, or on all of the current device's for 0; an even number.
// Errors: as run_grouped_gemm's.
[[nodiscard]] int count_gemm_blocks(int wanted);
void launch_grouped_gemm(GemmOp op, ElementType out_type, const KernelArgs& args, int num_blocks,
                         cudaStream_t stream);

cudaError_t launch_fprop(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_fprop_swiglu(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_dgrad(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_dgrad_f32(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_wgrad(const KernelArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_wgrad_f32(const KernelArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace uniep::cuda
