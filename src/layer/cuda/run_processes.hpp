// SPDX-License-Identifier: Apache-2.0
// A case on the GPU with each rank in a process of its own: on its own GPU, or sharing one.
#pragma once

#include "layer/cuda/run_case.hpp"

namespace uniep {

// With options.processes or options.job; rank r has GPU r modulo their number. Called by
// run_case_cuda. Errors: as run_case.
[[nodiscard]] CaseResult run_case_cuda_processes(const Case& data, const CudaRunOptions& options);

}  // namespace uniep
