// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM's shared memory: one struct, from which size and addresses both follow.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"

namespace uniep::cuda {

inline constexpr int kNumPipeStages = 4;
inline constexpr int kBoxesA = kTileM / 64;
inline constexpr int kBoxesB = kTileN / 64;
inline constexpr int kNumConsumers = 2;       // warpgroups that multiply
inline constexpr int kNumStagingBuffers = 2;  // per consumer, each one box
inline constexpr int kMaxHeldStages = 2;      // whose A boxes a consumer stages through besides
inline constexpr int kNumTickets = 2;

struct alignas(1024) SharedStorage {
  struct PipeStage {
    std::uint8_t a[kBoxesA][ptx::kBoxBytes];
    std::uint8_t b[kBoxesB][ptx::kBoxBytes];
  };
  PipeStage stages[kNumPipeStages];
  std::uint8_t staging[kNumConsumers][kNumStagingBuffers][ptx::kBoxBytes];
  // full: the loader's announcement and the bytes of both blocks' copies; the stage may be read.
  // empty: every consumer warp of both blocks is done with the stage; it may be overwritten, here
  // and by multicast in the peer.
  alignas(8) std::uint64_t full[kNumPipeStages];
  std::uint64_t empty[kNumPipeStages];
  // Tickets of the tiles that this cluster takes, a ring of two.
  // ticket_full: the drawing thread of block 0 has sent the ticket here.
  // ticket_wanted, in block 0: the loaders of both blocks are near the end of their tile.
  // ticket_read, in block 0: every consumer warp of both blocks knows the ticket.
  std::uint64_t ticket_full[kNumTickets];
  std::uint64_t ticket_read[kNumTickets];
  std::uint64_t ticket_wanted;
  std::uint32_t tickets[kNumTickets];
  // Of the fused kernels: 1 once some thread of the block found the group poisoned.
  std::uint32_t failed;
  // With token rows on n: running count of cluster tiles by group. Otherwise: experts in the order
  // of the walk.
  std::uint32_t groups[kMaxGroups];
};
static_assert(sizeof(SharedStorage) <= 232448, "an SM lends a block 227 KiB");

// Position in the ring of pipe stages, carried across tiles and experts.
struct PipeCursor {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kNumPipeStages) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

}  // namespace uniep::cuda
