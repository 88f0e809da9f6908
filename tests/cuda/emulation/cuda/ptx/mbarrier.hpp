// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/mbarrier.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "hopper.hpp"

namespace uniep::cuda::ptx {

inline std::uint8_t* dynamic_shared() { return emulation::shared_memory(emulation::this_block()); }
inline std::uint32_t shared_address(const void* pointer) {
  return emulation::shared_address_of(pointer);
}
inline void mbarrier_init(std::uint32_t barrier, std::uint32_t count) {
  emulation::init_mbarrier(barrier, count);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect_tx(std::uint32_t barrier, std::uint32_t bytes) {
  emulation::arrive_mbarrier(barrier, 1, bytes);
}
inline void mbarrier_arrive_cluster(std::uint32_t cluster_barrier) {
  emulation::arrive_mbarrier(cluster_barrier, 1, 0);
}
inline void mbarrier_arrive_cluster(std::uint32_t cluster_barrier, std::uint32_t count) {
  emulation::arrive_mbarrier(cluster_barrier, count, 0);
}
inline void mbarrier_send_cluster(std::uint32_t cluster_barrier, std::uint32_t cluster_address,
                                  std::uint32_t value) {
  emulation::send_word(cluster_barrier, cluster_address, value);
}
inline void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  emulation::wait_mbarrier(barrier, parity);
}
inline std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t value;
  std::memcpy(&value, emulation::shared_at(address, 4, 4), 4);
  return value;
}

}  // namespace uniep::cuda::ptx
