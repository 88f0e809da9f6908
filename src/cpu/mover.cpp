// SPDX-License-Identifier: Apache-2.0
#include "cpu/mover.hpp"

#include <algorithm>
#include <atomic>
#include <numeric>

namespace uniep::cpu {

template <typename S>
Mover<S>::Mover(Group& group, int rank, std::uint64_t epoch, Saved<S>& saved,
                std::span<const S> rows)
    : group_(group),
      shape_(group.config().shape),
      schedule_(group.config().schedule),
      rank_(rank),
      epoch_(epoch),
      saved_(saved),
      rows_(rows) {
  const auto num_local = static_cast<std::int32_t>(saved.plan.expert_rows.size());
  std::vector<std::int32_t> order(size(num_local));
  std::iota(order.begin(), order.end(), 0);
  if (schedule_.expert_order == ExpertOrder::rotated && num_local > 0) {
    std::rotate(order.begin(), order.begin() + rank % num_local, order.end());
  }
  tiles_ = make_row_tiles(saved.plan, schedule_.tile_m, order);
  tile_ranges_.assign(size(num_local), {0, 0});
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    auto& range = tile_ranges_[size(tiles_[i].local_expert)];
    if (range.second == 0) range.first = static_cast<std::int64_t>(i);
    range.second = static_cast<std::int64_t>(i) + 1;
  }
  tile_ready_.assign(tiles_.size(), 0);
  returned_.assign(tiles_.size(), 0);
}

template <typename S>
std::int64_t Mover<S>::num_chunks(std::int64_t num_tokens) const {
  return (num_tokens + schedule_.chunk - 1) / schedule_.chunk;
}

template <typename S>
std::vector<Task> Mover<S>::send_tasks() const {
  std::vector<Task> tasks;
  const bool rotated = schedule_.destination_order == DestinationOrder::rotated;
  // A pulled row is published once for all; a pushed one goes to one destination a task.
  const int num_destinations = schedule_.direction == Direction::pull ? 1 : shape_.num_ranks;
  for (int i = 0; i < num_destinations; ++i) {
    const int destination = rotated ? (rank_ + i) % shape_.num_ranks : i;
    for (std::int64_t chunk = 0; chunk < num_chunks(saved_.plan.num_tokens); ++chunk) {
      tasks.push_back({Role::send, static_cast<std::int32_t>(chunk), destination});
    }
  }
  return tasks;
}

template <typename S>
std::vector<Task> Mover<S>::pull_tasks() const {
  std::vector<Task> tasks;
  if (schedule_.direction == Direction::push || schedule_.payload == Payload::choice) return tasks;
  const bool rotated = schedule_.destination_order == DestinationOrder::rotated;
  for (int i = 0; i < shape_.num_ranks; ++i) {
    const int source = rotated ? (rank_ + i) % shape_.num_ranks : i;
    const std::int64_t num_tokens =
        group_.template region<RankHeader>(source, Region::header)->num_tokens;
    for (std::int64_t chunk = 0; chunk < num_chunks(num_tokens); ++chunk) {
      tasks.push_back({Role::pull, static_cast<std::int32_t>(chunk), source});
    }
  }
  return tasks;
}

template <typename S>
std::vector<Task> Mover<S>::reduce_tasks() const {
  std::vector<Task> tasks;
  for (std::int64_t chunk = 0; chunk < num_chunks(saved_.plan.num_tokens); ++chunk) {
    tasks.push_back({Role::reduce, static_cast<std::int32_t>(chunk), 0});
  }
  return tasks;
}

template <typename S>
std::optional<Awaited> Mover<S>::missing_word(std::uint64_t* word, std::uint64_t expected,
                                              Signal signal, Role role, std::int64_t tile,
                                              int peer) const {
  if (read_acquire(word) >= expected) return std::nullopt;
  Awaited awaited{.word = word, .expected = expected, .site = {}};
  awaited.site.rank = rank_;
  awaited.site.stage = to_string(role);
  awaited.site.role = to_string(role);
  awaited.site.tile = tile;
  awaited.site.peer = peer;
  awaited.site.signal = signal;
  awaited.site.task_role = role;
  if (tile >= 0) awaited.site.expert = global_expert(tiles_[size(tile)].local_expert);
  return awaited;
}

template <typename S>
std::int32_t Mover<S>::global_expert(std::int32_t local) const {
  return group_.config().placement.experts_of[size(rank_)][size(local)];
}

template <typename S>
void Mover<S>::describe(const Task& task, TraceEvent& event) const {
  switch (task.role) {
    case Role::send:
      if (schedule_.direction == Direction::push) {
        event.peer = static_cast<std::int16_t>(task.second);
      }
      return;
    case Role::pull:
      event.peer = static_cast<std::int16_t>(task.second);
      return;
    case Role::gemm1:
    case Role::gemm2:
    case Role::dgrad2:
    case Role::dgrad1:
      event.part = task.second;
      [[fallthrough]];
    case Role::fanout:
    case Role::activation:
    case Role::d_activation:
      event.expert = global_expert(tiles_[size(task.first)].local_expert);
      return;
    case Role::wgrad2:
    case Role::wgrad1:
      event.part = task.second;
      event.expert = global_expert(task.first);
      return;
    case Role::reduce:
    case Role::none:
      return;
  }
}

template <typename S>
std::optional<Awaited> Mover<S>::missing_rows(const Task& task) {
  return missing_word(&tile_ready_[size(task.first)], 1, Signal::tile_ready, task.role, task.first,
                      rank_);
}

template <typename S>
std::optional<Awaited> Mover<S>::missing(const Task& task) {
  std::optional<Awaited> awaited;
  if (task.role == Role::pull) {
    auto* ready = group_.region<std::uint64_t>(task.second, Region::send_ready);
    for_needed_tokens(task, [&](std::int64_t token) {
      if (awaited) return;
      awaited =
          missing_word(ready + token, epoch_, Signal::send_ready, Role::pull, -1, task.second);
    });
  } else if (task.role == Role::fanout) {
    const RowTile& t = tiles_[size(task.first)];
    if (saved_.origins[size(t.row)].rank < 0) fill_origins(task.first);
    const Signal signal = reads_sources() ? Signal::send_ready : Signal::row_ready;
    for (std::int64_t row = t.row; row < t.row + t.rows && !awaited; ++row) {
      const RowOrigin& origin = saved_.origins[size(row)];
      awaited = missing_word(source_of(origin).ready, epoch_, signal, Role::fanout, task.first,
                             origin.rank);
    }
  } else if (task.role == Role::reduce) {
    auto* ready = group_.region<std::uint64_t>(rank_, Region::return_ready);
    const auto& rank_of = group_.config().placement.rank_of;
    const std::int64_t first = std::int64_t{task.first} * schedule_.chunk * saved_.plan.topk;
    const std::int64_t last = std::min(first + std::int64_t{schedule_.chunk} * saved_.plan.topk,
                                       saved_.plan.num_tokens * saved_.plan.topk);
    for (std::int64_t i = first; i < last && !awaited; ++i) {
      const std::int32_t expert = saved_.topk_ids[size(i)];
      if (expert < 0) continue;
      awaited = missing_word(ready + i, epoch_, Signal::return_ready, Role::reduce, -1,
                             rank_of[size(expert)]);
    }
  }
  return awaited;
}

template <typename S>
std::int64_t Mover<S>::send(const Task& task) {
  const std::int64_t hidden = shape_.hidden;
  const std::size_t row_bytes = size(hidden) * sizeof(S);
  const Plan& plan = saved_.plan;
  const std::int64_t first = std::int64_t{task.first} * schedule_.chunk;
  const std::int64_t last = std::min(first + schedule_.chunk, plan.num_tokens);
  if (schedule_.direction == Direction::pull) {
    S* send_rows = group_.region<S>(rank_, Region::send_rows);
    auto* ready = group_.region<std::uint64_t>(rank_, Region::send_ready);
    for (std::int64_t token = first; token < last; ++token) {
      std::memcpy(send_rows + token * hidden, rows_.data() + token * hidden, row_bytes);
      // Raised by the owner, awaited by the ranks that fetch; the row becomes visible.
      raise(ready + token, epoch_);
    }
    return 0;
  }
  const int destination = task.second;
  const bool per_choice = schedule_.payload == Payload::choice;
  S* recv_rows = group_.region<S>(destination, Region::recv_rows);
  auto* ready = group_.region<std::uint64_t>(destination, Region::row_ready);
  const auto& rank_of = group_.config().placement.rank_of;
  std::int64_t rows = 0;
  for (std::int64_t token = first; token < last; ++token) {
    for (std::int64_t choice = 0; choice < plan.topk; ++choice) {
      const std::size_t index = size(token * plan.topk + choice);
      const std::int32_t expert = saved_.topk_ids[index];
      if (expert < 0 || rank_of[size(expert)] != destination) continue;
      if (!per_choice && plan.first_choices[index] != choice) continue;
      std::int64_t place = rank_ * shape_.max_tokens + token;
      if (per_choice) place = place * plan.topk + choice;
      std::memcpy(recv_rows + place * hidden, rows_.data() + token * hidden, row_bytes);
      // Raised by the source rank, awaited by the owner's fan-out; the row becomes visible.
      raise(ready + place, epoch_);
      ++rows;
    }
  }
  return destination == rank_ ? 0 : rows * static_cast<std::int64_t>(row_bytes);
}

template <typename S>
template <typename Visitor>
void Mover<S>::for_needed_tokens(const Task& task, Visitor visit) {
  const int source = task.second;
  const std::int64_t first = std::int64_t{task.first} * schedule_.chunk;
  const std::int64_t last = std::min(first + schedule_.chunk, peer_tokens(source));
  const auto* ids = group_.region<std::int32_t>(source, Region::topk_ids);
  const auto& rank_of = group_.config().placement.rank_of;
  for (std::int64_t token = first; token < last; ++token) {
    const std::int32_t* choices = ids + token * shape_.topk;
    const bool needed = std::any_of(choices, choices + shape_.topk, [&](std::int32_t expert) {
      return expert >= 0 && rank_of[size(expert)] == rank_;
    });
    if (needed) visit(token);
  }
}

template <typename S>
std::int64_t Mover<S>::pull(const Task& task) {
  const std::int64_t hidden = shape_.hidden;
  const std::size_t row_bytes = size(hidden) * sizeof(S);
  const S* send_rows = group_.region<S>(task.second, Region::send_rows);
  S* recv_rows = group_.region<S>(rank_, Region::recv_rows);
  auto* ready = group_.region<std::uint64_t>(rank_, Region::row_ready);
  std::int64_t rows = 0;
  for_needed_tokens(task, [&](std::int64_t token) {
    const std::int64_t place = task.second * shape_.max_tokens + token;
    std::memcpy(recv_rows + place * hidden, send_rows + token * hidden, row_bytes);
    // Raised by this rank's puller, awaited by its fan-out; the row becomes visible.
    raise(ready + place, epoch_);
    ++rows;
  });
  return task.second == rank_ ? 0 : rows * static_cast<std::int64_t>(row_bytes);
}

template <typename S>
bool Mover<S>::reads_sources() const {
  return schedule_.direction == Direction::pull && schedule_.payload == Payload::choice;
}

template <typename S>
typename Mover<S>::Source Mover<S>::source_of(const RowOrigin& origin) {
  const std::int64_t token = origin.token_choice / shape_.topk;
  const std::int64_t hidden = shape_.hidden;
  const bool per_choice = schedule_.payload == Payload::choice;
  if (reads_sources()) {
    return {group_.region<S>(origin.rank, Region::send_rows) + token * hidden,
            group_.region<std::uint64_t>(origin.rank, Region::send_ready) + token};
  }
  std::int64_t place = origin.rank * shape_.max_tokens + token;
  if (per_choice) place = place * shape_.topk + origin.token_choice % shape_.topk;
  return {group_.region<S>(rank_, Region::recv_rows) + place * hidden,
          group_.region<std::uint64_t>(rank_, Region::row_ready) + place};
}

// Reads the sources' send_order for the tile's rows; a forward does so once, backward reuses it.
template <typename S>
void Mover<S>::fill_origins(std::int64_t tile) {
  const RowTile& t = tiles_[size(tile)];
  const Plan& plan = saved_.plan;
  for (int source = 0; source < plan.num_ranks; ++source) {
    const std::size_t run = size(t.local_expert) * size(plan.num_ranks) + size(source);
    const std::int64_t first = std::max(plan.run_starts[run], t.row);
    const std::int64_t last = std::min(plan.run_starts[run] + plan.run_rows[run], t.row + t.rows);
    const auto* order = group_.region<std::int32_t>(source, Region::send_order);
    const auto* weights = group_.region<float>(source, Region::topk_weights);
    for (std::int64_t row = first; row < last; ++row) {
      const std::int32_t choice = order[plan.source_starts[run] + row - plan.run_starts[run]];
      saved_.origins[size(row)] = {source, choice};
      saved_.weights[size(row)] = weights[choice];
    }
  }
}

template <typename S>
std::int64_t Mover<S>::fanout(std::int64_t tile, S* rows_out) {
  const RowTile& t = tiles_[size(tile)];
  const std::size_t row_bytes = size(shape_.hidden) * sizeof(S);
  std::int64_t foreign_rows = 0;
  for (std::int64_t row = t.row; row < t.row + t.rows; ++row) {
    const RowOrigin& origin = saved_.origins[size(row)];
    std::memcpy(rows_out + row * shape_.hidden, source_of(origin).row, row_bytes);
    foreign_rows += origin.rank != rank_ ? 1 : 0;
  }
  // Raised by the fan-out, awaited by the tile's GEMM tasks; rows_out of the tile becomes visible.
  raise(&tile_ready_[size(tile)], 1);
  return reads_sources() ? foreign_rows * static_cast<std::int64_t>(row_bytes) : 0;
}

template <typename S>
std::int64_t Mover<S>::return_columns(std::int64_t tile, std::int64_t n0, std::int64_t n,
                                      const float* c, std::int64_t ldc,
                                      std::uint64_t num_column_tiles) {
  const RowTile& t = tiles_[size(tile)];
  std::int64_t foreign_rows = 0;
  for (std::int64_t i = 0; i < t.rows; ++i) {
    const RowOrigin& origin = saved_.origins[size(t.row + i)];
    S* home = group_.region<S>(origin.rank, Region::staging) +
              std::int64_t{origin.token_choice} * shape_.hidden + n0;
    for (std::int64_t j = 0; j < n; ++j) home[j] = narrow<S>(c[i * ldc + j]);
    foreign_rows += origin.rank != rank_ ? 1 : 0;
  }
  const std::int64_t bytes = foreign_rows * n * std::int64_t{sizeof(S)};
  // acq_rel: the last column tile's worker sees, and passes on, what the others stored.
  const std::uint64_t before =
      std::atomic_ref<std::uint64_t>(returned_[size(tile)]).fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 < num_column_tiles) return bytes;
  for (std::int64_t i = 0; i < t.rows; ++i) {
    const RowOrigin& origin = saved_.origins[size(t.row + i)];
    // Raised by the expert's owner, awaited by the home rank's reduce; all columns of the staged
    // row, and its d_topk_weight, become visible.
    raise(group_.region<std::uint64_t>(origin.rank, Region::return_ready) + origin.token_choice,
          epoch_);
  }
  return bytes;
}

template <typename S>
void Mover<S>::return_d_weight(std::int64_t row, float value) {
  const RowOrigin& origin = saved_.origins[size(row)];
  group_.region<float>(origin.rank, Region::d_weight_staging)[origin.token_choice] = value;
}

template <typename S>
void Mover<S>::reduce(const Task& task, S* out, float* d_topk_weights) {
  const std::int64_t hidden = shape_.hidden;
  const Plan& plan = saved_.plan;
  const std::int64_t first = std::int64_t{task.first} * schedule_.chunk;
  const std::int64_t last = std::min(first + schedule_.chunk, plan.num_tokens);
  const S* staging = group_.region<S>(rank_, Region::staging);
  const float* d_weights = group_.region<float>(rank_, Region::d_weight_staging);
  std::vector<float> sum(size(hidden));
  for (std::int64_t token = first; token < last; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0F);
    for (std::int64_t i = token * plan.topk; i < (token + 1) * plan.topk; ++i) {
      const std::int32_t expert = saved_.topk_ids[size(i)];
      if (expert < 0) {
        if (d_topk_weights != nullptr) d_topk_weights[i] = 0.0F;
        continue;
      }
      const S* row = staging + i * hidden;
      for (std::int64_t n = 0; n < hidden; ++n) sum[size(n)] += widen(row[n]);
      if (d_topk_weights != nullptr) d_topk_weights[i] = d_weights[i];
    }
    for (std::int64_t n = 0; n < hidden; ++n) out[token * hidden + n] = narrow<S>(sum[size(n)]);
  }
}

template class Mover<float>;
template class Mover<Bf16>;

}  // namespace uniep::cpu
