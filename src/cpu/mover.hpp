// SPDX-License-Identifier: Apache-2.0
// The moving half of an operation, the same forward and backward: rows leave by (token, destination
// rank) or by choice, arrive in the receive region, are fanned out to expert-major rows, and results
// come home to staging, where each token is summed in choice order.
#pragma once

#include <cstring>

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

  void send(const Task& task);
  void pull(const Task& task);
  // Copies the tile's rows to rows_out [padded_rows, hidden], waiting for each; raises tile_ready.
  void fanout(std::int64_t tile, S* rows_out);
  void wait_tile_ready(std::int64_t tile, Role role);
  // Columns [n0, n0 + n) of the tile's results, c [rows, n] with row stride ldc, to their homes.
  // After the last of `num_column_tiles` calls the home ranks are signalled.
  void return_columns(std::int64_t tile, std::int64_t n0, std::int64_t n, const float* c,
                      std::int64_t ldc, std::uint64_t num_column_tiles);
  void return_d_weight(std::int64_t row, float value);
  // Sums the chunk's tokens into out [num_tokens, hidden] and, where asked, copies d_topk_weights.
  void reduce(const Task& task, S* out, float* d_topk_weights);

  // Bounded wait for a word private to this rank or in a heap.
  void wait(std::uint64_t* word, std::uint64_t expected, Role role, std::int64_t tile, int peer);
  [[nodiscard]] const std::vector<RowTile>& tiles() const { return tiles_; }
  // Indices into tiles() of one local expert's tiles.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> tiles_of(std::int32_t local_expert) const {
    return tile_ranges_[size(local_expert)];
  }

 private:
  struct Source {  // where a row is to be read once its signal is there
    const S* row;
    std::uint64_t* ready;
  };
  [[nodiscard]] Source source_of(const RowOrigin& origin);
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
  std::vector<std::uint64_t> tile_ready_;    // [tiles] 1 once its rows are fanned out
  std::vector<std::uint64_t> returned_;      // [tiles] column tiles returned so far
};

extern template class Mover<float>;
extern template class Mover<Bf16>;

}  // namespace uniep::cpu
