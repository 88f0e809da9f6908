// SPDX-License-Identifier: Apache-2.0
// The split kernels as they are, compiled for this machine. There are no tensor cores.
#include "base/error.hpp"
#include "cuda/fused_args.hpp"
#include "cuda/grouped_gemm.hpp"
#include "cuda/grouped_gemm_launch.hpp"
#include "cuda/kernels/activation.cu"
#include "cuda/kernels/combine.cu"
#include "cuda/kernels/dispatch.cu"

namespace uniep::cuda {

KernelArgs make_kernel_args(GemmOp, ElementType, ElementType, const ExpertRows&,
                            std::span<const GroupedGemm>, int, std::uint32_t*) {
  throw_world("tensor cores are not emulated");
}
int count_gemm_blocks(int wanted) { return wanted == 0 ? 132 : wanted / 2 * 2; }
void launch_grouped_gemm(GemmOp, ElementType, const KernelArgs&, int, cudaStream_t) {}
cudaError_t launch_fused_dispatch(const FusedDispatchArgs&, cudaStream_t) { return cudaSuccess; }
cudaError_t launch_fused_combine(const FusedCombineArgs&, cudaStream_t) { return cudaSuccess; }

}  // namespace uniep::cuda
