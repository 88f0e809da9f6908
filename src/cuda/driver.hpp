// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "base/error.hpp"

namespace uniep::cuda {

// A function of the driver, asked from the runtime, so that nothing links against the driver's
// library. Errors: world where the driver is older than CUDA 12.0.
template <typename Function>
Function* driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned int kSince = 12000;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &entry, kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
    throw_world("this CUDA driver has no {} ({}); CUDA 12.0 or newer is needed", name,
                cudaGetErrorString(error));
  }
  return reinterpret_cast<Function*>(entry);
}

}  // namespace uniep::cuda
