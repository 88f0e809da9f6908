// SPDX-License-Identifier: Apache-2.0
// Thread-block clusters and register budgets, one function an instruction.
#pragma once

#include <cstdint>

namespace uniep::cuda::ptx {

__device__ __forceinline__ std::uint32_t cluster_block_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Arrive and wait together: every thread of the cluster has arrived, and what it wrote before
// (barrier initialisation included) is visible to every thread after.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The address, in the cluster's shared window, of this block's `address` in block `rank`.
__device__ __forceinline__ std::uint32_t map_shared(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Hands registers back / takes them. Whole warpgroups only; kCount is a multiple of 8. Needs a
// kernel with __launch_bounds__(threads, 1).
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads of the block.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace uniep::cuda::ptx
