// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/tma.hpp.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "hopper.hpp"

namespace uniep::cuda::ptx {

inline void prefetch_tensor_map(const CUtensorMap*) {}

inline void tma_load_3d(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                        int c0, int c1, int c2) {
  emulation::load_tensor(destination, *map, barrier, 0, {c0, c1, c2, 0, 0});
}
inline void tma_load_3d_multicast(std::uint32_t destination, const CUtensorMap* map,
                                  std::uint32_t barrier, std::uint16_t blocks, int c0, int c1,
                                  int c2) {
  emulation::load_tensor(destination, *map, barrier, blocks, {c0, c1, c2, 0, 0});
}
inline void tma_load_5d(std::uint32_t destination, const CUtensorMap* map, std::uint32_t barrier,
                        int c0, int c3, int c4) {
  emulation::load_tensor(destination, *map, barrier, 0, {c0, 0, 0, c3, c4});
}
inline void tma_load_5d_multicast(std::uint32_t destination, const CUtensorMap* map,
                                  std::uint32_t barrier, std::uint16_t blocks, int c0, int c3,
                                  int c4) {
  emulation::load_tensor(destination, *map, barrier, blocks, {c0, 0, 0, c3, c4});
}
inline void tma_store_3d(const CUtensorMap* map, std::uint32_t source, int c0, int c1, int c2) {
  emulation::store_tensor(emulation::Copy::Kind::store, *map, source, {c0, c1, c2, 0, 0});
}
inline void tma_reduce_add_3d(const CUtensorMap* map, std::uint32_t source, int c0, int c1,
                              int c2) {
  emulation::store_tensor(emulation::Copy::Kind::add, *map, source, {c0, c1, c2, 0, 0});
}
inline void tma_commit() { emulation::commit_stores(); }
template <int kPending>
void tma_wait_read() {
  emulation::wait_stores(kPending);
}
inline void tma_wait_written() { emulation::wait_stores(0); }
inline void fence_proxy_async_shared() {}
inline void fence_proxy_async_global() {}

}  // namespace uniep::cuda::ptx
