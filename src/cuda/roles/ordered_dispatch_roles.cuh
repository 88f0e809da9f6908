// SPDX-License-Identifier: Apache-2.0
// Dispatch in the order in which tiles use rows. An entry is a (token, choice) of a rank's
// send_order; the entries of a destination are those of its experts, experts ascending. A token's
// row travels with the first of its entries there, and is written to all its places at once;
// whoever writes it counts each place as there.
#pragma once

#include "cuda/roles/arrival.cuh"
#include "cuda/roles/dispatch_roles.cuh"

namespace uniep::cuda {

// Where a sender's entries lie, in shared memory. The owner order is experts by (owner, local).
struct SendTable {
  std::uint32_t first_entry[kMaxPlanExperts + 1];  // by place in the owner order
  std::uint32_t send_start[kMaxPlanExperts];       // the same experts' starts in send_order
  std::uint32_t dest_start[kMaxDeviceRanks + 1];   // first_entry of each destination
  std::uint32_t arriving[kMaxDeviceRanks];         // entries that come from each source
  std::int32_t num_experts;

  // From an entry, counted over all destinations, to its place in send_order.
  [[nodiscard]] __device__ std::uint32_t find(std::uint32_t entry) const {
    int low = 0;
    int high = num_experts;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_entry[middle] <= entry) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return send_start[low] + (entry - first_entry[low]);
  }
};

// All threads of the block call it, and may read the table after.
__device__ inline void fill_send_table(const Mover& m, const FusedDispatchArgs& args,
                                       const DispatchRank& mine, SendTable& table) {
  const int num_ranks = m.shape.group.num_ranks;
  for (int i = m.thread; i < args.num_experts; i += 32 * kFusedWarps) {
    const int expert = args.in_order[i];
    const std::int64_t start = mine.plan.send_starts[expert];
    table.send_start[i] = static_cast<std::uint32_t>(start);
    table.first_entry[i] = static_cast<std::uint32_t>(mine.plan.send_starts[expert + 1] - start);
  }
  if (m.thread == 0) table.num_experts = args.num_experts;
  __syncthreads();
  if (m.warp == 0) {
    std::uint32_t total = 0;
    for (int first = 0; first < args.num_experts; first += 32) {
      const int i = first + m.lane;
      const std::uint32_t count = i < args.num_experts ? table.first_entry[i] : 0;
      std::uint32_t sum = count;
      for (std::uint32_t step = 1; step < 32; step *= 2) {
        const std::uint32_t below = __shfl_up_sync(kWholeWarp, sum, step);
        if (m.lane >= static_cast<int>(step)) sum += below;
      }
      if (i < args.num_experts) table.first_entry[i] = total + sum - count;
      total += __shfl_sync(kWholeWarp, sum, 31);
    }
    if (m.lane == 0) table.first_entry[args.num_experts] = total;
    __syncwarp();
    if (m.lane <= num_ranks) table.dest_start[m.lane] = table.first_entry[args.owner_start[m.lane]];
  } else {
    for (int source = m.warp - 1; source < num_ranks; source += kFusedWarps - 1) {
      std::uint32_t sum = 0;
      for (int local = m.lane; local < mine.experts; local += 32) {
        sum += static_cast<std::uint32_t>(mine.plan.run_rows[local * num_ranks + source]);
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        sum += __shfl_sync(kWholeWarp, sum, m.lane ^ distance);
      }
      if (m.lane == 0) table.arriving[source] = sum;
    }
  }
  __syncthreads();
}

[[nodiscard]] __device__ __forceinline__ int entry_chunks(const Mover& m, std::uint32_t entries) {
  const auto chunk = static_cast<std::uint32_t>(m.shape.chunk);
  return static_cast<int>((entries + chunk - 1) / chunk);
}

// Rows of the own rank's tokens.
struct OwnRows {
  const Mover& m;
  const DispatchRank& mine;

  [[nodiscard]] __device__ std::int32_t slot(std::int64_t place) const {
    return mine.plan.owners[place] == m.rank ? static_cast<std::int32_t>(mine.plan.slots[place])
                                             : -1;
  }
  [[nodiscard]] __device__ float weight(std::int64_t place) const {
    return mine.topk_weights[place];
  }
  [[nodiscard]] __device__ const std::byte* row(std::int64_t token, int) const {
    return mine.rows + token * m.shape.row_bytes;
  }
};

// Rows that `source` has pushed here.
struct PushedRows {
  const Mover& m;
  int source;

  [[nodiscard]] __device__ std::int32_t slot(std::int64_t place) const {
    return __ldcg(
        received<const std::int32_t>(m, m.rank, m.shape.regions.recv_slots, source, place));
  }
  [[nodiscard]] __device__ float weight(std::int64_t place) const {
    return __ldcg(received<const float>(m, m.rank, m.shape.regions.recv_weights, source, place));
  }
  [[nodiscard]] __device__ const std::byte* row(std::int64_t token, int choice) const {
    return received_row(m, m.rank, source, token, choice);
  }
};

// The row that choice `choice` of the carried place's token becomes here; -1: none, or not now.
template <typename Rows>
[[nodiscard]] __device__ __forceinline__ std::int32_t slot_of(const Mover& m, const Rows& rows,
                                                              std::int32_t carried, int choice) {
  const int topk = m.shape.topk;
  if (choice >= topk || (m.shape.per_choice && choice != carried % topk)) return -1;
  return rows.slot(carried / topk * topk + choice);
}

// Each lane brings an entry: the place whose row it carries, or -1. Writes the rows to all their
// places at this rank, then counts these as there.
template <typename Rows>
__device__ void fan_out(const Mover& m, const DispatchRank& mine, const FusedWords& words,
                        std::int32_t carried_here, const Rows& rows) {
  const int topk = m.shape.topk;
  const std::uint32_t carriers = __ballot_sync(kWholeWarp, carried_here >= 0);
  for (std::uint32_t left = carriers; left != 0; left &= left - 1) {
    const std::int32_t carried =
        __shfl_sync(kWholeWarp, carried_here, __ffs(static_cast<int>(left)) - 1);
    const std::int64_t token = carried / topk;
    const auto target = [&](int choice) -> std::byte* {
      const std::int32_t slot = slot_of(m, rows, carried, choice);
      if (slot < 0) return nullptr;
      mine.weights_out[slot] = rows.weight(token * topk + choice);
      return mine.rows_out + slot * m.shape.row_bytes;
    };
    copy_row<uint4>(rows.row(token, carried % topk), m.shape.row_bytes,
                    {target(m.lane), target(m.lane + 32)}, m.lane);
  }
  if (carriers == 0) return;
  ptx::fence_proxy_async_global();
  __syncwarp();
  __threadfence();
  for (std::uint32_t left = carriers; left != 0; left &= left - 1) {
    const std::int32_t carried =
        __shfl_sync(kWholeWarp, carried_here, __ffs(static_cast<int>(left)) - 1);
    for (int choice = m.lane; choice < topk; choice += 32) {
      const std::int32_t slot = slot_of(m, rows, carried, choice);
      if (slot >= 0) count_row(words, m.epoch, slot);
    }
  }
}

[[nodiscard]] __device__ __forceinline__ std::int32_t* carried_places(const Mover& m, int at,
                                                                      int source) {
  return received<std::int32_t>(m, at, m.shape.regions.recv_places, source, 0);
}

// The row of a carried place to `to`, with the places that it becomes there and their weights.
__device__ inline void push_row(const Mover& m, const DispatchRank& mine, int to,
                                std::int32_t carried) {
  const MoveShape& shape = m.shape;
  const std::int64_t token = carried / shape.topk;
  for (int choice = m.lane; choice < shape.topk; choice += 32) {
    const std::int64_t place = token * shape.topk + choice;
    if (shape.per_choice && place != carried) continue;
    *received<std::int32_t>(m, to, shape.regions.recv_slots, m.rank, place) =
        mine.plan.owners[place] == to ? static_cast<std::int32_t>(mine.plan.slots[place]) : -1;
    *received<float>(m, to, shape.regions.recv_weights, m.rank, place) = mine.topk_weights[place];
  }
  std::byte* const target = received_row(m, to, m.rank, token, carried % shape.topk);
  copy_row<uint4>(mine.rows + token * shape.row_bytes, shape.row_bytes,
                  {m.lane == 0 ? target : nullptr, nullptr}, m.lane);
}

__device__ inline void push_entries(const Mover& m, const DispatchRank& mine,
                                    const FusedWords& words, const SendTable& table, int to,
                                    int chunk) {
  const MoveShape& shape = m.shape;
  const std::uint32_t start = table.dest_start[to];
  const std::uint32_t entries = table.dest_start[to + 1] - start;
  const std::uint32_t first = static_cast<std::uint32_t>(chunk) * shape.chunk;
  const std::uint32_t last = min(first + shape.chunk, entries);
  for (std::uint32_t base = first; base < last; base += 32) {
    const std::uint32_t entry = base + static_cast<std::uint32_t>(m.lane);
    std::int32_t carried = -1;
    if (entry < last) {
      const std::int32_t place = mine.plan.send_order[table.find(start + entry)];
      const bool carries =
          shape.per_choice || mine.plan.first_choices[place] == place % shape.topk;
      carried = carries ? place : -1;
      if (to != m.rank) carried_places(m, to, m.rank)[entry] = carried;
    }
    if (to == m.rank) {
      fan_out(m, mine, words, carried, OwnRows{m, mine});
      continue;
    }
    for (std::uint32_t left = __ballot_sync(kWholeWarp, carried >= 0); left != 0;
         left &= left - 1) {
      push_row(m, mine, to, __shfl_sync(kWholeWarp, carried, __ffs(static_cast<int>(left)) - 1));
    }
  }
  __syncwarp();
  if (to != m.rank && m.lane == 0) {
    auto* const ready = m.region<std::uint64_t>(to, shape.regions.chunk_ready);
    ptx::store_release_system(&ready[m.rank * shape.max_chunks + chunk], m.epoch);
  }
}

// Chunks to all destinations in turn, the own rank first, so that no destination waits for another.
__device__ inline void push_role(const Mover& m, const DispatchRank& mine, const FusedWords& words,
                                 const SendTable& table, int worker, int workers) {
  const int num_ranks = m.shape.group.num_ranks;
  int most = 0;
  for (int to = 0; to < num_ranks; ++to) {
    most = max(most, entry_chunks(m, table.dest_start[to + 1] - table.dest_start[to]));
  }
  for (int i = worker; i < most * num_ranks; i += workers) {
    const int to = (m.rank + i % num_ranks) % num_ranks;
    const int chunk = i / num_ranks;
    if (chunk < entry_chunks(m, table.dest_start[to + 1] - table.dest_start[to])) {
      push_entries(m, mine, words, table, to, chunk);
    }
  }
}

// Waits for the chunk and writes its rows to their places; false if the group is poisoned.
[[nodiscard]] __device__ inline bool relay_entries(const Mover& m, const DispatchRank& mine,
                                                   const FusedWords& words, std::uint32_t entries,
                                                   int source, int chunk) {
  const MoveShape& shape = m.shape;
  bool failed = false;
  if (m.lane == 0) {
    const auto* ready = m.region<const std::uint64_t>(m.rank, shape.regions.chunk_ready);
    failed = !wait_at_least(shape.group, &ready[source * shape.max_chunks + chunk], m.epoch,
                            {m.rank, WaitStage::dispatch_rows, source, -1});
  }
  if (__ballot_sync(kWholeWarp, failed) != 0) return false;
  const std::uint32_t first = static_cast<std::uint32_t>(chunk) * shape.chunk;
  const std::uint32_t last = min(first + shape.chunk, entries);
  for (std::uint32_t base = first; base < last; base += 32) {
    const std::uint32_t entry = base + static_cast<std::uint32_t>(m.lane);
    const std::int32_t carried =
        entry < last ? __ldcg(carried_places(m, m.rank, source) + entry) : -1;
    fan_out(m, mine, words, carried, PushedRows{m, source});
  }
  return true;
}

// Draws chunks of all sources in turn, as they are likely to arrive, until none is left. False if
// the group is poisoned.
[[nodiscard]] __device__ inline bool relay_role(const Mover& m, const DispatchRank& mine,
                                                const FusedWords& words, const SendTable& table) {
  const int num_ranks = m.shape.group.num_ranks;
  const int peers = num_ranks - 1;
  int most = 0;
  for (int source = 0; source < num_ranks; ++source) {
    if (source != m.rank) most = max(most, entry_chunks(m, table.arriving[source]));
  }
  for (;;) {
    int drawn = 0;
    if (m.lane == 0) {
      drawn = static_cast<int>(count_in_epoch<kCountShift>(words.relays, m.epoch, 1));
    }
    drawn = __shfl_sync(kWholeWarp, drawn, 0);
    if (drawn >= most * peers) return true;
    const int source = (m.rank + 1 + drawn % peers) % num_ranks;
    const int chunk = drawn / peers;
    if (chunk >= entry_chunks(m, table.arriving[source])) continue;
    if (!relay_entries(m, mine, words, table.arriving[source], source, chunk)) return false;
  }
}

}  // namespace uniep::cuda
