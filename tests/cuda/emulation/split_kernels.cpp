// SPDX-License-Identifier: Apache-2.0
// The split kernels as they are, compiled for this machine.
#include "cuda/kernels/activation.cu"
#include "cuda/kernels/combine.cu"
#include "cuda/kernels/dispatch.cu"
