// SPDX-License-Identifier: Apache-2.0
// The split kernels as they are, compiled for this machine. There are no tensor cores.
#include "base/error.hpp"
#include "cuda/grouped_gemm.hpp"
#include "cuda/kernels/activation.cu"
#include "cuda/kernels/combine.cu"
#include "cuda/kernels/dispatch.cu"

namespace uniep::cuda {

void run_grouped_gemm(GemmOp, ElementType, ElementType, const ExpertRows&,
                      std::span<const GroupedGemm>, const GemmLaunch&) {
  throw_world("tensor cores are not emulated");
}

}  // namespace uniep::cuda
