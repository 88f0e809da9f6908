// SPDX-License-Identifier: Apache-2.0
// The moving half of an operation, the same forward and backward: rows leave by (token, destination
// rank) or by choice, arrive in the receive region, are fanned out to expert-major rows, and
// results come home to staging, where each token is summed in choice order.
#pragma once

#include <cstring>
#include <optional>

#include "cpu/rank_layer.hpp"
#include "cpu/task_runner.hpp"
#include "memory/signal.hpp"
#include "memory/wait.hpp"

namespace uniep::cpu {

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <typename S>
class Mover {
 public:
  // `rows` [num_tokens, hidden] is what travels; `epoch` is this operation's.
  Mover(Group& group, int rank, std::uint64_t epoch, Saved<S>& saved, std::span<const S> rows);

  // This rank's tasks of the moving roles, in ticket order.
  [[nodiscard]] std::vector<Task> send_tasks() const;
  [[nodiscard]] std::vector<Task> pull_tasks() const;
  [[nodiscard]] std::vector<Task> reduce_tasks() const;

  // These four return the bytes that crossed between ranks.
  std::int64_t send(const Task& task);
  std::int64_t pull(const Task& task);
  // Copies the tile's rows to rows_out [padded_rows, hidden]; raises tile_ready.
  std::int64_t fanout(std::int64_t tile, S* rows_out);
  // Columns [n0, n0 + n) of the tile's results, c [rows, n] with row stride ldc, to their homes.
  // After the last of `num_column_tiles` calls the home ranks are signalled.
  std::int64_t return_columns(std::int64_t tile, std::int64_t n0, std::int64_t n, const float* c,
                              std::int64_t ldc, std::uint64_t num_column_tiles);
  void return_d_weight(std::int64_t row, float value);
  // Sums the chunk's tokens into out [num_tokens, hidden] and, where asked, copies d_topk_weights.
  void reduce(const Task& task, S* out, float* d_topk_weights);

  // What a task of a moving role still waits for; nothing: it can run now.
  [[nodiscard]] std::optional<Awaited> missing(const Task& task);
  // The same for a multiplying task that needs its tile's rows.
  [[nodiscard]] std::optional<Awaited> missing_rows(const Task& task);
  // A word private to this rank or in a heap: awaited unless it is there.
  [[nodiscard]] std::optional<Awaited> missing_word(std::uint64_t* word, std::uint64_t expected,
                                                    Signal signal, Role role, std::int64_t tile,
                                                    int peer) const;
  // Fills in the part, expert and peer of a task of any role.
  void describe(const Task& task, TraceEvent& event) const;
  [[nodiscard]] const std::vector<RowTile>& tiles() const { return tiles_; }
  // Indices into tiles() of one local expert's tiles.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> tiles_of(std::int32_t local_expert) const {
    return tile_ranges_[size(local_expert)];
  }

 private:
  // Tokens of a chunk that this rank has to fetch.
  template <typename Visitor>
  void for_needed_tokens(const Task& task, Visitor visit);
  struct Source {  // where a row is to be read once its signal is there
    const S* row;
    std::uint64_t* ready;
  };
  [[nodiscard]] Source source_of(const RowOrigin& origin);
  // Whether the fan-out itself fetches rows from their source ranks.
  [[nodiscard]] bool reads_sources() const;
  [[nodiscard]] std::int32_t global_expert(std::int32_t local) const;
  [[nodiscard]] std::int64_t num_chunks(std::int64_t num_tokens) const;
  void fill_origins(std::int64_t tile);
  [[nodiscard]] std::int64_t peer_tokens(int rank) {
    return group_.region<RankHeader>(rank, Region::header)->num_tokens;
  }

  Group& group_;
  const HeapShape& shape_;
  const Schedule& schedule_;
  int rank_;
  std::uint64_t epoch_;
  Saved<S>& saved_;
  std::span<const S> rows_;
  std::vector<RowTile> tiles_;
  std::vector<std::pair<std::int64_t, std::int64_t>> tile_ranges_;
  std::vector<std::uint64_t> tile_ready_;  // [tiles] 1 once its rows are fanned out
  std::vector<std::uint64_t> returned_;    // [tiles] column tiles returned so far
};

extern template class Mover<float>;
extern template class Mover<Bf16>;

}  // namespace uniep::cpu
