// SPDX-License-Identifier: Apache-2.0
// Bulk tensor copies (TMA). Coordinates count elements, innermost dimension first. Parts of a box
// outside the tensor read as zero and are not written, but count in the bytes of a load.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace uniep::cuda::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Global to this block's shared memory; completes on `barrier` by bytes.
__device__ __forceinline__ void tma_load_3d(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// The same box to the same shared address of every block in `blocks` (a bit each); each block's own
// barrier at the address `barrier` gets the bytes.
__device__ __forceinline__ void tma_load_3d_multicast(std::uint32_t destination,
                                                      const CUtensorMap* map, std::uint32_t barrier,
                                                      std::uint16_t blocks, int c0, int c1,
                                                      int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// As above for five dimensions, of which the second and third start at 0.
__device__ __forceinline__ void tma_load_5d(std::uint32_t destination, const CUtensorMap* map,
                                            std::uint32_t barrier, int c0, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %4, %5, %6}], [%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(0), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d_multicast(std::uint32_t destination,
                                                      const CUtensorMap* map, std::uint32_t barrier,
                                                      std::uint16_t blocks, int c0, int c3,
                                                      int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %5, %6, %7}], [%2], %3;" ::"r"(destination),
      "l"(map), "r"(barrier), "h"(blocks), "r"(c0), "r"(0), "r"(c3), "r"(c4)
      : "memory");
}

// Shared to global, in the bulk group that the next tma_commit closes. The source must have been
// made visible to the asynchronous proxy (fence_proxy_async) by its writers.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, std::uint32_t source, int c0,
                                             int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// Adds to global memory instead of storing: one relaxed addition an element, at the L2 cache.
__device__ __forceinline__ void tma_reduce_add_3d(const CUtensorMap* map, std::uint32_t source,
                                                  int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// Closes this thread's bulk group.
__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// At most kPending of this thread's groups still read their source: older sources may be reused.
template <int kPending>
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All of this thread's groups have written global memory.
__device__ __forceinline__ void tma_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's ordinary shared-memory writes before later asynchronous-proxy reads (TMA
// stores, WGMMA) that a barrier puts after it.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory that TMA loads read.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace uniep::cuda::ptx
