// SPDX-License-Identifier: Apache-2.0
// Shared memory and the mbarrier objects in it, named by their 32-bit shared address.
#pragma once

#include <cstdint>

namespace uniep::cuda::ptx {

// The bytes that the launch asked for.
__device__ __forceinline__ std::uint8_t* dynamic_shared() {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  return shared_bytes;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// `count` arrivals complete a phase. Follow with mbarrier_init_fence and a block or cluster
// barrier.
__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the cluster and to the asynchronous proxy.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival (release, block scope) that also announces `bytes` of bulk copies in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier,
                                                          std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// One arrival on a barrier of any block of the cluster; the address comes from map_shared. Orders
// nothing beyond this block (a cluster-scope release costs a full memory fence): enough where the
// arriving role only read shared memory through WGMMA that has completed.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// `count` such arrivals in one.
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t cluster_barrier,
                                                        std::uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_barrier), "r"(count)
               : "memory");
}

// Announces 4 bytes to a barrier of any block of the cluster, as one arrival, and sends them: a
// wait on that barrier sees `value` at `cluster_address`, in the same block.
__device__ __forceinline__ void mbarrier_send_cluster(std::uint32_t cluster_barrier,
                                                      std::uint32_t cluster_address,
                                                      std::uint32_t value) {
  asm volatile(
      "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], 4;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%1], %2, [%0];" ::"r"(
          cluster_barrier),
      "r"(cluster_address), "r"(value)
      : "memory");
}

// Returns once the phase with this parity has completed (acquire, block scope): what its bulk
// copies wrote is visible. Only for barriers whose arrivals come from this kernel's own roles;
// waits on other ranks are bounded and live elsewhere.
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace uniep::cuda::ptx
