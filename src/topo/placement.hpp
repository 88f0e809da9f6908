// SPDX-License-Identifier: Apache-2.0
// Which rank owns which expert. A value: the default is contiguous, the first E mod R ranks own one
// more, and E < R leaves ranks without experts. Any other map with ascending locals is as good.
#pragma once

#include <cstdint>
#include <vector>

namespace uniep {

// An even split of `total` things over `parts`; the first total mod parts own one more.
[[nodiscard]] constexpr std::int64_t share_size(std::int64_t total, int parts, int part) {
  return total / parts + (part < total % parts ? 1 : 0);
}
[[nodiscard]] constexpr std::int64_t share_start(std::int64_t total, int parts, int part) {
  const std::int64_t extra = total % parts;
  return (total / parts) * part + (part < extra ? part : extra);
}

struct Placement {
  int num_ranks = 1;
  std::vector<std::int32_t> rank_of;                  // [num_experts]
  std::vector<std::int32_t> local_of;                 // [num_experts]
  std::vector<std::vector<std::int32_t>> experts_of;  // [num_ranks] ascending expert ids

  [[nodiscard]] int num_experts() const { return static_cast<int>(rank_of.size()); }
  [[nodiscard]] int num_local_experts(int rank) const {
    return static_cast<int>(experts_of[static_cast<std::size_t>(rank)].size());
  }
};

// Errors: invalid_argument if num_experts < 1, num_ranks < 1, or an owner is outside the ranks.
[[nodiscard]] Placement make_contiguous_placement(int num_experts, int num_ranks);
[[nodiscard]] Placement make_placement(const std::vector<std::int32_t>& rank_of, int num_ranks);

}  // namespace uniep
