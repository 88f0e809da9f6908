// SPDX-License-Identifier: Apache-2.0
#include "cuda/grouped_gemm_launch.hpp"
#include "cuda/kernels/grouped_gemm.cuh"

namespace uniep::cuda {

cudaError_t launch_fprop(const KernelArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_grouped_gemm<kFprop>(args, num_blocks, stream);
}

}  // namespace uniep::cuda
