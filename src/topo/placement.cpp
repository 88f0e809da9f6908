// SPDX-License-Identifier: Apache-2.0
#include "topo/placement.hpp"

#include "base/error.hpp"

namespace uniep {

Placement make_placement(const std::vector<std::int32_t>& rank_of, int num_ranks) {
  if (num_ranks < 1) throw_invalid("num_ranks is {}; it must be at least 1", num_ranks);
  if (rank_of.empty()) throw_invalid("num_experts is 0; it must be at least 1");
  Placement placement;
  placement.num_ranks = num_ranks;
  placement.rank_of = rank_of;
  placement.local_of.resize(rank_of.size());
  placement.experts_of.resize(static_cast<std::size_t>(num_ranks));
  for (std::size_t expert = 0; expert < rank_of.size(); ++expert) {
    const std::int32_t rank = rank_of[expert];
    if (rank < 0 || rank >= num_ranks) {
      throw_invalid("expert {} is placed on rank {}; ranks are 0 to {}", expert, rank,
                    num_ranks - 1);
    }
    auto& mine = placement.experts_of[static_cast<std::size_t>(rank)];
    placement.local_of[expert] = static_cast<std::int32_t>(mine.size());
    mine.push_back(static_cast<std::int32_t>(expert));
  }
  return placement;
}

Placement make_contiguous_placement(int num_experts, int num_ranks) {
  if (num_experts < 1) throw_invalid("num_experts is {}; it must be at least 1", num_experts);
  if (num_ranks < 1) throw_invalid("num_ranks is {}; it must be at least 1", num_ranks);
  std::vector<std::int32_t> rank_of;
  rank_of.reserve(static_cast<std::size_t>(num_experts));
  for (int rank = 0; rank < num_ranks; ++rank) {
    rank_of.insert(rank_of.end(),
                   static_cast<std::size_t>(share_size(num_experts, num_ranks, rank)), rank);
  }
  return make_placement(rank_of, num_ranks);
}

}  // namespace uniep
