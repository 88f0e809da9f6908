// SPDX-License-Identifier: Apache-2.0
// What lies where in a rank's part of the symmetric heap, described once: total bytes and every
// pointer come from the same list of regions. Receive regions are indexed by (source rank, token)
// or (source rank, token, choice) and staging by (token, choice), so no routing overflows them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "uniep/schedule.hpp"

namespace uniep {

enum class Region : std::size_t {
  header,            // RankHeader
  splits,            // [num_experts] i64, rows this rank sends to each expert
  send_order,        // [max_tokens, topk] i32, from the plan
  topk_ids,          // [max_tokens, topk] i32
  topk_weights,      // [max_tokens, topk] f32
  send_rows,         // [max_tokens, hidden], pull only: rows that others fetch
  recv_rows,         // [num_ranks, max_tokens (, topk), hidden]: rows that arrived
  staging,           // [max_tokens, topk, hidden]: results that came home
  d_weight_staging,  // [max_tokens, topk] f32
  send_ready,        // signals, [max_tokens]
  row_ready,         // signals, [num_ranks, max_tokens (, topk)]
  return_ready,      // signals, [max_tokens, topk]
  count
};

// The signals among these words carry epochs, which only grow.
struct RankHeader {
  // Written by the owner once its header, splits, send_order, topk_ids and topk_weights of the
  // operation are written; peers wait for the operation's epoch; these fields become visible.
  std::uint64_t published;
  // Written by the owner when it will read no peer's memory for this operation any more; peers
  // wait for the epoch of the operation before, and may then overwrite what they published.
  std::uint64_t consumed;
  std::uint64_t schedule_hash;
  std::int64_t num_tokens;
  std::int64_t operation;  // 0 forward, 1 backward
};

struct HeapShape {
  int num_ranks = 1;
  int num_experts = 1;
  int topk = 1;
  std::int64_t hidden = 0;
  std::int64_t max_tokens = 0;  // per rank
  std::int64_t element_bytes = 4;
};

class HeapLayout {
 public:
  // Errors: invalid_argument if the bytes of one rank overflow 63 bits.
  HeapLayout(const HeapShape& shape, const Schedule& schedule);

  [[nodiscard]] std::int64_t offset(Region region) const {
    return offsets_[static_cast<std::size_t>(region)];
  }
  [[nodiscard]] std::int64_t bytes(Region region) const {
    return sizes_[static_cast<std::size_t>(region)];
  }
  [[nodiscard]] std::int64_t bytes_per_rank() const { return offsets_.back(); }

 private:
  static constexpr std::size_t kCount = static_cast<std::size_t>(Region::count);
  std::array<std::int64_t, kCount> sizes_{};
  std::array<std::int64_t, kCount + 1> offsets_{};
};

inline constexpr std::int64_t kRegionAlignment = 128;  // bytes

}  // namespace uniep
