// SPDX-License-Identifier: Apache-2.0
// The plain product as it is, compiled for this machine.
#include "cuda/kernels/plain_gemm.cu"
