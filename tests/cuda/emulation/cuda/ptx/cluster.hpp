// SPDX-License-Identifier: Apache-2.0
// Stands in for src/cuda/ptx/cluster.hpp.
#pragma once

#include <cstdint>

#include "hopper.hpp"

namespace uniep::cuda::ptx {

inline std::uint32_t cluster_block_rank() {
  return emulation::rank_in_cluster(emulation::this_block());
}
inline void cluster_sync() { emulation::sync_cluster(); }
inline std::uint32_t map_shared(std::uint32_t address, std::uint32_t rank) {
  return emulation::map_to_cluster(address, rank);
}
template <int kCount>
void setmaxnreg_dec() {}
template <int kCount>
void setmaxnreg_inc() {}
inline bool elect_one() {
  emulation::gather_warp(0);
  return threadIdx.x % 32 == 0;
}
inline void named_barrier_sync(int id, int threads) { emulation::sync_named(id, threads); }

}  // namespace uniep::cuda::ptx
