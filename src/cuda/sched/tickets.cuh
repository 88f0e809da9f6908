// SPDX-License-Identifier: Apache-2.0
// Which tile a cluster takes next. One thread of the cluster draws tickets, from a counter in
// device memory so that whoever is free takes the next tile, or in a fixed stride, and sends each
// to all roles of both blocks. A ticket is drawn no earlier than a loader needs it: one drawn early
// is a tile that no idle cluster can take.
#pragma once

#include <cstdint>

#include "cuda/grouped_gemm_args.hpp"
#include "cuda/kernels/shared_storage.cuh"
#include "cuda/ptx/cluster.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda/sched/tile_walk.cuh"

namespace uniep::cuda {

// A loader asks for the next ticket this many k tiles before the end of its tile: drawing takes
// about as long as a cluster multiplies two.
inline constexpr int kWantAhead = 2;

// Position in the ring of tickets.
struct TicketCursor {
  std::uint32_t count = 0;

  [[nodiscard]] __device__ __forceinline__ int slot() const {
    return static_cast<int>(count % kNumTickets);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t parity() const {
    return count / kNumTickets % 2;
  }
};

// A role's view of the tickets.
template <KernelConfig kConfig>
struct TileReader {
  SharedStorage& shared;
  TileWalk<kConfig> walk;
  TicketCursor cursor;

  // Waits for the next ticket; false after the last tile.
  __device__ __forceinline__ bool next(Tile& tile) {
    ptx::mbarrier_wait(ptx::shared_address(&shared.ticket_full[cursor.slot()]), cursor.parity());
    return walk.find(ptx::load_shared(ptx::shared_address(&shared.tickets[cursor.slot()])), tile);
  }

  // A consumer warp knows the ticket of next().
  __device__ __forceinline__ void release(int lane) {
    __syncwarp();  // all lanes have read it
    if (lane == 0) {
      const std::uint32_t read = ptx::shared_address(&shared.ticket_read[cursor.slot()]);
      ptx::mbarrier_arrive_cluster(ptx::map_shared(read, 0));
    }
    cursor.count++;
  }

  // A loader knows it, and wants the one after.
  __device__ __forceinline__ void want_next() {
    ptx::mbarrier_arrive_cluster(ptx::map_shared(ptx::shared_address(&shared.ticket_wanted), 0));
    cursor.count++;
  }
};

// How the clusters of one table begin. Those that come late, because they do something else before,
// draw their first ticket too; the others, the only ones without a counter, have theirs.
struct TicketStart {
  std::uint32_t first;      // of this cluster
  std::uint32_t num_first;  // tickets that need no draw, from 0
  std::uint32_t num_late;   // clusters that draw their first
  bool is_late;
};

// The drawing role: one thread of block 0 of a cluster.
template <KernelConfig kConfig>
__device__ __forceinline__ void draw_role(const KernelArgs& args, SharedStorage& shared,
                                          const TicketStart& start) {
  const std::uint32_t num_tickets = count_tickets<kConfig>(args, shared.groups);
  const auto draw = [&] {
    const std::uint32_t drawn = atomicAdd(args.tickets, 1U);
    // Each tile's ticket leads to one draw, so this was the launch's last: ready for the next.
    if (drawn + 1 == num_tickets + start.num_late) *args.tickets = 0;
    return start.num_first + drawn;
  };
  std::uint32_t ticket = start.is_late ? draw() : start.first;
  for (TicketCursor cursor;; cursor.count++) {
    // The slot's ticket before this one is two draws old; its loaders have asked for more since.
    if (cursor.count >= kNumTickets) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.ticket_read[cursor.slot()]),
                         cursor.parity() ^ 1U);
    }
    UNIEP_UNROLL for (std::uint32_t rank = 0; rank < 2; ++rank) {
      ptx::mbarrier_send_cluster(
          ptx::map_shared(ptx::shared_address(&shared.ticket_full[cursor.slot()]), rank),
          ptx::map_shared(ptx::shared_address(&shared.tickets[cursor.slot()]), rank), ticket);
    }
    if (ticket >= num_tickets) return;
    ptx::mbarrier_wait(ptx::shared_address(&shared.ticket_wanted), cursor.count % 2);
    ticket = args.tickets == nullptr ? ticket + start.num_first : draw();
  }
}

}  // namespace uniep::cuda
