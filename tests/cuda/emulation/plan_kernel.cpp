// SPDX-License-Identifier: Apache-2.0
// The plan's kernel as it is, compiled for this machine.
#include "cuda/plan_args.hpp"

namespace uniep::cuda {
namespace {
// What the kernel declares as its dynamic shared memory.
thread_local std::uint32_t
    dynamic_shared[plan_shared_bytes(kMaxPlanExperts, kMaxPlanExperts, kMaxDeviceRanks) / 4];
}  // namespace
}  // namespace uniep::cuda

#include "cuda/kernels/plan.cu"
