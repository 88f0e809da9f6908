// SPDX-License-Identifier: Apache-2.0
// The two roles of dispatch, a warp each. A pusher sends a chunk of tokens: to every rank which of
// its experts' rows they become and with which weights, and the rows themselves; rows of experts of
// its own rank go to their places at once. A relay takes a chunk that arrived and writes each row
// to all its places.
#pragma once

#include "cuda/roles/move_rows.cuh"

namespace uniep::cuda {

// What arrives at rank `at` from `source` for `place` = token * topk + choice.
template <typename T>
[[nodiscard]] __device__ __forceinline__ T* received(const Mover& m, int at, std::int64_t offset,
                                                     int source, std::int64_t place) {
  return m.region<T>(at, offset) + (source * m.shape.max_tokens * m.shape.topk + place);
}

[[nodiscard]] __device__ __forceinline__ std::byte* received_row(const Mover& m, int at, int source,
                                                                 std::int64_t token, int choice) {
  std::int64_t row = source * m.shape.max_tokens + token;
  if (m.shape.per_choice) row = row * m.shape.topk + choice;
  return m.region<std::byte>(at, m.shape.regions.recv_rows) + row * m.shape.row_bytes;
}

// Slots and weights of the chunk's choices to all ranks.
__device__ inline void push_places(const Mover& m, const DispatchRank& mine, std::int64_t first,
                                   std::int64_t last) {
  const MoveShape& shape = m.shape;
  for (std::int64_t place = first * shape.topk + m.lane; place < last * shape.topk; place += 32) {
    const int owner = mine.plan.owners[place];
    const auto slot = static_cast<std::int32_t>(mine.plan.slots[place]);
    const float weight = mine.topk_weights != nullptr ? mine.topk_weights[place] : 0.0F;
    for (int i = 1; i < shape.group.num_ranks; ++i) {
      const int to = (m.rank + i) % shape.group.num_ranks;
      *received<std::int32_t>(m, to, shape.regions.recv_slots, m.rank, place) =
          owner == to ? slot : -1;
      if (mine.topk_weights != nullptr) {
        *received<float>(m, to, shape.regions.recv_weights, m.rank, place) = weight;
      }
    }
    if (owner == m.rank && mine.weights_out != nullptr) mine.weights_out[slot] = weight;
  }
}

// Where the row of `token` goes for the sake of `choice`; null where another choice sees to it.
[[nodiscard]] __device__ __forceinline__ std::byte* push_target(const Mover& m,
                                                                const DispatchRank& mine,
                                                                std::int64_t token, int choice) {
  if (choice >= m.shape.topk) return nullptr;
  const std::int64_t place = token * m.shape.topk + choice;
  const int owner = mine.plan.owners[place];
  if (owner == kNoOwner) return nullptr;
  if (owner == m.rank) return mine.rows_out + mine.plan.slots[place] * m.shape.row_bytes;
  if (m.shape.pull_dispatch) return nullptr;
  if (!m.shape.per_choice && mine.plan.first_choices[place] != choice) return nullptr;
  return received_row(m, owner, m.rank, token, choice);
}

// The place from which others fetch the row, if one of them does.
[[nodiscard]] __device__ __forceinline__ std::byte* publish_target(const Mover& m,
                                                                   const DispatchRank& mine,
                                                                   std::int64_t token) {
  bool is_remote = false;
  for (int choice = m.lane; choice < m.shape.topk; choice += 32) {
    const int owner = mine.plan.owners[token * m.shape.topk + choice];
    is_remote = is_remote || (owner != kNoOwner && owner != m.rank);
  }
  if (__ballot_sync(kWholeWarp, is_remote) == 0 || m.lane != 0) return nullptr;
  return m.region<std::byte>(m.rank, m.shape.regions.send_rows) + token * m.shape.row_bytes;
}

template <typename Unit>
__device__ void push_chunk(const Mover& m, const DispatchRank& mine, int chunk) {
  const MoveShape& shape = m.shape;
  const std::int64_t first = std::int64_t{chunk} * shape.chunk;
  const std::int64_t end = first + shape.chunk;
  const std::int64_t last = end < mine.num_tokens ? end : mine.num_tokens;
  push_places(m, mine, first, last);
  for (std::int64_t token = first; token < last; ++token) {
    const std::byte* const row = mine.rows + token * shape.row_bytes;
    copy_row<Unit>(row, shape.row_bytes,
                   {push_target(m, mine, token, m.lane), push_target(m, mine, token, m.lane + 32)},
                   m.lane);
    if (shape.pull_dispatch) {
      copy_row<Unit>(row, shape.row_bytes, {publish_target(m, mine, token), nullptr}, m.lane);
    }
  }
  __syncwarp();
  if (m.lane < shape.group.num_ranks && m.lane != m.rank) {
    auto* const ready = m.region<std::uint64_t>(m.lane, shape.regions.chunk_ready);
    ptx::store_release_system(&ready[m.rank * shape.max_chunks + chunk], m.epoch);
  }
}

[[nodiscard]] __device__ __forceinline__ std::int32_t received_slot(const Mover& m, int source,
                                                                    std::int64_t token,
                                                                    int choice) {
  if (choice >= m.shape.topk) return -1;
  return __ldcg(received<const std::int32_t>(m, m.rank, m.shape.regions.recv_slots, source,
                                             token * m.shape.topk + choice));
}

// Waits for the chunk and writes its rows and weights to their places; false if the group is
// poisoned.
template <typename Unit>
[[nodiscard]] __device__ bool relay_chunk(const Mover& m, const DispatchRank& mine, int source,
                                          int chunk, std::int64_t num_tokens) {
  const MoveShape& shape = m.shape;
  bool failed = false;
  if (m.lane == 0) {
    const auto* ready = m.region<const std::uint64_t>(m.rank, shape.regions.chunk_ready);
    failed = !wait_at_least(shape.group, &ready[source * shape.max_chunks + chunk], m.epoch,
                            {m.rank, WaitStage::dispatch_rows, source, -1});
  }
  if (__ballot_sync(kWholeWarp, failed) != 0) return false;
  const std::int64_t first = std::int64_t{chunk} * shape.chunk;
  const std::int64_t end = first + shape.chunk;
  const std::int64_t last = end < num_tokens ? end : num_tokens;
  for (std::int64_t token = first; token < last; ++token) {
    const auto target = [&](int choice) -> std::byte* {
      const std::int32_t slot = received_slot(m, source, token, choice);
      if (slot < 0) return nullptr;
      if (mine.weights_out != nullptr) {
        mine.weights_out[slot] = __ldcg(received<const float>(m, m.rank, shape.regions.recv_weights,
                                                              source, token * shape.topk + choice));
      }
      return mine.rows_out + slot * shape.row_bytes;
    };
    const PerChoice<std::byte*> targets{target(m.lane), target(m.lane + 32)};
    const auto* const published =
        m.region<const std::byte>(source, shape.regions.send_rows) + token * shape.row_bytes;
    if (!shape.per_choice) {
      copy_row<Unit>(shape.pull_dispatch ? published : received_row(m, m.rank, source, token, 0),
                     shape.row_bytes, targets, m.lane);
      continue;
    }
    for_each_pointer(targets, [&](int choice, std::byte* to) {
      copy_row<Unit>(
          shape.pull_dispatch ? published : received_row(m, m.rank, source, token, choice),
          shape.row_bytes, {m.lane == 0 ? to : nullptr, nullptr}, m.lane);
    });
  }
  return true;
}

// Zeros between the last row of each expert and the next multiple of 64.
template <typename Unit>
__device__ void clear_padding(const Mover& m, const DispatchRank& mine, int worker, int workers) {
  const auto units = static_cast<int>(m.shape.row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
  for (int expert = worker; expert < mine.experts; expert += workers) {
    const std::int64_t end = mine.plan.expert_starts[expert + 1];
    for (std::int64_t row = mine.plan.expert_starts[expert] + mine.plan.expert_rows[expert];
         row < end; ++row) {
      auto* const to = reinterpret_cast<Unit*>(mine.rows_out + row * m.shape.row_bytes);
      for (int unit = m.lane; unit < units; unit += 32) to[unit] = Unit{};
    }
  }
}

}  // namespace uniep::cuda
