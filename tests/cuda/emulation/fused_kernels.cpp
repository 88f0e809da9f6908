// SPDX-License-Identifier: Apache-2.0
// The fused kernels as they are, compiled for this machine.
#include "cuda/kernels/fused_combine.cu"
#include "cuda/kernels/fused_dispatch.cu"
