// SPDX-License-Identifier: Apache-2.0
#include "simulate/load.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "topo/placement.hpp"

namespace uniep::simulate {
namespace {

constexpr std::int64_t kTileRows = 256;
constexpr std::int64_t kBlockRows = 64;

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check(const LayerSizes& sizes, const Topology& topology) {
  if (topology.ranks < 1 || topology.ranks > kMaxRanks || topology.ranks != sizes.ranks) {
    throw_invalid("{} ranks for sizes of {}; they must agree and be 1 to {}", topology.ranks,
                  sizes.ranks, kMaxRanks);
  }
  if (topology.ranks_per_gpu < 1 || topology.ranks_per_gpu > topology.ranks ||
      topology.gpus_per_node < 1) {
    throw_invalid("{} ranks on a GPU and {} GPUs in a node; 1 to {} and at least 1 are valid",
                  topology.ranks_per_gpu, topology.gpus_per_node, topology.ranks);
  }
  if (sizes.hidden < 1 || sizes.ffn < 1 || sizes.experts < 1 || sizes.tokens < 0 ||
      sizes.topk < 1 || sizes.topk > kMaxTopk) {
    throw_invalid(
        "tokens {}, hidden {}, ffn {}, experts {}, topk {}; at least 0, 1, 1, 1 and 1 to {} are "
        "valid",
        sizes.tokens, sizes.hidden, sizes.ffn, sizes.experts, sizes.topk, kMaxTopk);
  }
}

Way way_of(const Topology& topology, int from, int to) {
  if (from == to) return own;
  const int gpu_a = from / topology.ranks_per_gpu, gpu_b = to / topology.ranks_per_gpu;
  if (gpu_a == gpu_b) return near;
  return gpu_a / topology.gpus_per_node == gpu_b / topology.gpus_per_node ? up : out;
}

// Pieces of `size` rows that an expert's rows fill, the last one partly: the expectation where they
// are many independent draws with mean `mean`.
double expected_pieces(double mean, double size) {
  const double spread = std::sqrt(mean);
  const double certain = std::max(0.0, std::floor((mean - 8 * spread) / size));
  double pieces = certain;
  for (double rows = certain * size; rows < mean + 8 * spread + 1; rows += size) {
    // At least one row more than these.
    pieces += rows == 0 ? 1 - std::exp(-mean)
                        : 0.5 * std::erfc((rows + 0.5 - mean) / (spread * std::sqrt(2.0)));
  }
  return pieces;
}

}  // namespace

Groups groups_of(std::span<const std::int64_t> expert_rows) {
  Groups groups;
  groups.experts = static_cast<double>(expert_rows.size());
  for (const std::int64_t rows : expert_rows) {
    const std::int64_t tiles = div_up(rows, kTileRows);
    const std::int64_t blocks = div_up(rows, kBlockRows);
    groups.rows += static_cast<double>(rows);
    groups.tiles += static_cast<double>(tiles);
    groups.blocks += static_cast<double>(blocks);
    if (tiles > 0) {
      groups.widest =
          std::max(groups.widest, static_cast<double>(kBlockRows * div_up(blocks, tiles)));
    }
  }
  return groups;
}

Load uniform_load(const LayerSizes& sizes, const Topology& topology, double skew) {
  check(sizes, topology);
  if (!(skew >= 1 && skew <= kMaxRanks)) {
    throw_invalid("skew is {}; it must be 1 to {}", skew, kMaxRanks);
  }
  Load load;
  load.sizes = sizes;
  load.topology = topology;
  const auto ranks = static_cast<double>(topology.ranks);
  const auto experts = static_cast<double>(sizes.experts);
  const auto tokens = static_cast<double>(sizes.tokens);
  const double choices = tokens * sizes.topk;
  load.skew = std::min(skew, ranks);
  // The share of tokens with at least one choice for a given rank.
  const double local = std::max(1.0, experts / ranks);
  double none = 1;
  for (int i = 0; i < sizes.topk; ++i) {
    none *= std::max(0.0, experts - local - i) / std::max(1.0, experts - i);
  }
  const double owners = std::min(ranks, experts);  // fewer experts than ranks: some own none
  const double on_gpu = topology.ranks_per_gpu;
  const double in_node = std::min(ranks, on_gpu * topology.gpus_per_node);
  const ByWay peers{1, on_gpu - 1, in_node - on_gpu, ranks - in_node};
  for (std::size_t way = 0; way < kWays; ++way) {
    const double owning = peers[way] * owners / ranks;
    load.choices[way] = choices * owning / owners;
    load.rows[way] = std::min(load.choices[way], tokens * owning * (1 - none));
    // The busiest receiver gets more from everybody, but from a token no more than it has.
    const double factor = load.skew;
    load.in_choices[way] = std::min(load.choices[way] * factor, choices * peers[way]);
    load.in_rows[way] = std::min(load.rows[way] * factor, tokens * peers[way]);
  }
  Groups& groups = load.groups;
  for (const double rows : load.in_choices) groups.rows += rows;
  groups.rows = std::min(choices * ranks, choices * ranks / owners * load.skew);
  groups.experts = std::ceil(local);
  const double per_expert = groups.rows / groups.experts;
  if (groups.rows > 0) {
    groups.tiles = groups.experts * expected_pieces(per_expert, kTileRows);
    groups.blocks = groups.experts * expected_pieces(per_expert, kBlockRows);
    groups.widest = std::clamp(std::ceil(per_expert / kBlockRows) * kBlockRows,
                               static_cast<double>(kBlockRows), static_cast<double>(kTileRows));
  }
  return load;
}

Load load_of(const LayerSizes& sizes, const Topology& topology,
             std::span<const std::int64_t> tokens_per_rank,
             std::span<const std::int32_t> topk_ids) {
  check(sizes, topology);
  const auto num_ranks = static_cast<std::size_t>(topology.ranks);
  const auto topk = static_cast<std::size_t>(sizes.topk);
  if (tokens_per_rank.size() != num_ranks) {
    throw_invalid("token counts of {} ranks for {} ranks; they must agree", tokens_per_rank.size(),
                  num_ranks);
  }
  const Placement placement =
      make_contiguous_placement(static_cast<int>(sizes.experts), topology.ranks);
  Load load;
  load.sizes = sizes;
  load.topology = topology;
  load.sizes.tokens = 0;
  std::vector<std::int64_t> expert_rows(static_cast<std::size_t>(sizes.experts), 0);
  std::vector<ByWay> in_choices(num_ranks, ByWay{}), in_rows(num_ranks, ByWay{});
  std::vector<std::size_t> last_token(num_ranks, topk_ids.size());
  std::size_t token = 0;
  double all_rows = 0;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    const std::int64_t tokens = tokens_per_rank[rank];
    const std::size_t end = token + static_cast<std::size_t>(std::max<std::int64_t>(0, tokens));
    if (tokens < 0 || end * topk > topk_ids.size()) {
      throw_invalid("rank {} has {} tokens, but topk_ids has {} choices", rank, tokens,
                    topk_ids.size());
    }
    load.sizes.tokens = std::max(load.sizes.tokens, tokens);
    ByWay choices{}, rows{};
    for (; token < end; ++token) {
      for (std::size_t i = token * topk; i < (token + 1) * topk; ++i) {
        const std::int32_t expert = topk_ids[i];
        if (expert < 0) continue;
        if (expert >= sizes.experts) {
          throw_invalid("topk_ids of token {} is {}; ids are 0 to {}, or -1 for masked", token,
                        expert, sizes.experts - 1);
        }
        const auto owner =
            static_cast<std::size_t>(placement.rank_of[static_cast<std::size_t>(expert)]);
        const Way way = way_of(topology, static_cast<int>(rank), static_cast<int>(owner));
        ++expert_rows[static_cast<std::size_t>(expert)];
        ++all_rows;
        ++choices[way];
        ++in_choices[owner][way];
        if (last_token[owner] == token) continue;
        last_token[owner] = token;
        ++rows[way];
        ++in_rows[owner][way];
      }
    }
    for (std::size_t way = 0; way < kWays; ++way) {
      load.choices[way] = std::max(load.choices[way], choices[way]);
      load.rows[way] = std::max(load.rows[way], rows[way]);
    }
  }
  if (token * topk != topk_ids.size()) {
    throw_invalid("{} tokens of all ranks, but topk_ids has {} choices; topk is {}", token,
                  topk_ids.size(), topk);
  }
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    std::vector<std::int64_t> mine;
    for (const std::int32_t expert : placement.experts_of[rank]) {
      mine.push_back(expert_rows[static_cast<std::size_t>(expert)]);
    }
    const Groups groups = groups_of(mine);
    if (groups.rows > load.groups.rows || rank == 0) load.groups = groups;
    for (std::size_t way = 0; way < kWays; ++way) {
      load.in_choices[way] = std::max(load.in_choices[way], in_choices[rank][way]);
      load.in_rows[way] = std::max(load.in_rows[way], in_rows[rank][way]);
    }
  }
  if (all_rows > 0) load.skew = load.groups.rows * static_cast<double>(num_ranks) / all_rows;
  return load;
}

std::string skew_class(double skew) {
  if (skew <= 1.1) return "even";
  if (skew <= 1.5) return "mild";
  return skew <= 3 ? "strong" : "extreme";
}

}  // namespace uniep::simulate
