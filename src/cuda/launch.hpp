// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace uniep::cuda {

// Blocks of `kernel` that the current device holds at once.
template <typename Args>
cudaError_t count_resident_blocks(void (*kernel)(Args), int threads, std::size_t shared_bytes,
                                  int* blocks) {
  int device = 0, num_sms = 0, per_sm = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared_bytes);
  }
  *blocks = per_sm * num_sms;
  return error;
}

// A cooperative launch is resident as a whole or refused.
template <typename Args>
cudaError_t launch(void (*kernel)(Args), bool cooperative, int blocks, int threads,
                   std::size_t shared_bytes, cudaStream_t stream, const Args& args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// A launch of clusters, whose size the kernel says; only the blocks of a cluster are sure to be
// resident together.
template <typename Args>
cudaError_t launch_clusters(void (*kernel)(Args), int blocks, int threads, std::size_t shared_bytes,
                            cudaStream_t stream, const Args& args) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return launch(kernel, false, blocks, threads, shared_bytes, stream, args);
}

}  // namespace uniep::cuda
