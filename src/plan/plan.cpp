// SPDX-License-Identifier: Apache-2.0
#include "plan/plan.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"

namespace uniep {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

void check_input(const PlanInput& input) {
  UNIEP_ASSERT(input.placement != nullptr);
  if (input.topk < 1 || input.topk > kMaxTopk) {
    throw_invalid("topk is {}; it must be 1 to {}", input.topk, kMaxTopk);
  }
  const auto topk = at(input.topk);
  if (input.topk_ids.size() % topk != 0) {
    throw_invalid("topk_ids has {} elements; it must be a multiple of topk = {}",
                  input.topk_ids.size(), input.topk);
  }
  if (input.topk_ids.size() > at(std::numeric_limits<std::int32_t>::max())) {
    throw_invalid("topk_ids has {} elements; a rank's tokens times topk must stay below 2^31",
                  input.topk_ids.size());
  }
  const Placement& placement = *input.placement;
  if (input.rank < 0 || input.rank >= placement.num_ranks) {
    throw_invalid("rank is {}; ranks are 0 to {}", input.rank, placement.num_ranks - 1);
  }
  const std::size_t want = at(placement.num_ranks) * at(placement.num_experts());
  if (input.splits.size() != want) {
    throw_invalid("splits has {} elements; it must be num_ranks x num_experts = {}",
                  input.splits.size(), want);
  }
}

// Receiver side: starts of experts and of their runs by source rank.
void plan_rows(const PlanInput& input, Plan& plan) {
  const Placement& placement = *input.placement;
  const int num_experts = placement.num_experts();
  const auto& mine = placement.experts_of[at(input.rank)];
  const std::size_t runs = mine.size() * at(plan.num_ranks);
  plan.expert_rows.assign(mine.size(), 0);
  plan.expert_starts.assign(mine.size() + 1, 0);
  plan.run_starts.assign(runs, 0);
  plan.run_rows.assign(runs, 0);
  plan.source_starts.assign(runs, 0);
  for (int source = 0; source < plan.num_ranks; ++source) {
    const auto row = input.splits.subspan(at(source) * at(num_experts), at(num_experts));
    std::int64_t sent = 0;
    std::size_t local = 0;
    for (int expert = 0; expert < num_experts && local < mine.size(); ++expert) {
      if (expert == mine[local]) {
        const std::size_t run = local * at(plan.num_ranks) + at(source);
        plan.run_rows[run] = row[at(expert)];
        plan.source_starts[run] = sent;
        ++local;
      }
      sent += row[at(expert)];
    }
  }
  std::int64_t start = 0;
  for (std::size_t local = 0; local < mine.size(); ++local) {
    std::int64_t next = start;
    for (int source = 0; source < plan.num_ranks; ++source) {
      const std::size_t run = local * at(plan.num_ranks) + at(source);
      plan.run_starts[run] = next;
      next += plan.run_rows[run];
    }
    plan.expert_rows[local] = next - start;
    plan.num_rows += next - start;
    start = (next + kExpertRowAlignment - 1) / kExpertRowAlignment * kExpertRowAlignment;
    plan.expert_starts[local + 1] = start;
  }
}

// First slot of this rank's run for every expert, at whichever rank owns it.
std::vector<std::int64_t> my_run_starts(const PlanInput& input) {
  const Placement& placement = *input.placement;
  const int num_experts = placement.num_experts();
  std::vector<std::int64_t> starts(at(num_experts), 0);
  std::vector<std::int64_t> next(at(placement.num_ranks), 0);
  for (int expert = 0; expert < num_experts; ++expert) {
    std::int64_t before = 0;
    std::int64_t total = 0;
    for (int source = 0; source < placement.num_ranks; ++source) {
      const std::int64_t rows = input.splits[at(source) * at(num_experts) + at(expert)];
      if (source < input.rank) before += rows;
      total += rows;
    }
    std::int64_t& start = next[at(placement.rank_of[at(expert)])];
    starts[at(expert)] = start + before;
    start += (total + kExpertRowAlignment - 1) / kExpertRowAlignment * kExpertRowAlignment;
  }
  return starts;
}

void plan_sends(const PlanInput& input, Plan& plan) {
  const Placement& placement = *input.placement;
  const int num_experts = placement.num_experts();
  const auto own = input.splits.subspan(at(input.rank) * at(num_experts), at(num_experts));
  const std::vector<std::int64_t> starts = my_run_starts(input);
  struct Target {
    std::int64_t slot_bias;  // slot minus place in send_order
    std::int32_t next;       // place of the next row
    std::int32_t rank;
  };
  std::vector<Target> targets(at(num_experts));
  std::int64_t sent = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    targets[at(expert)] = {.slot_bias = starts[at(expert)] - sent,
                           .next = static_cast<std::int32_t>(sent),
                           .rank = placement.rank_of[at(expert)]};
    sent += own[at(expert)];
  }
  plan.send_starts.resize(at(num_experts) + 1);
  for (int expert = 0; expert < num_experts; ++expert) {
    plan.send_starts[at(expert)] = targets[at(expert)].next;
  }
  plan.send_starts.back() = sent;
  plan.send_order.resize(at(sent));
  plan.slots.resize(input.topk_ids.size());
  plan.first_choices.resize(input.topk_ids.size());
  // For each rank the choice that carries the last token's row; one before the token's own choices
  // means none yet.
  std::vector<std::int64_t> first_of(at(placement.num_ranks), -1);

  // Local spans: a store of bytes may change any member, so the loop would load them every time.
  const std::span<const std::int32_t> ids = input.topk_ids;
  const std::span<Target> target_of(targets);
  const std::span<std::int64_t> firsts(first_of);
  const std::span<std::int64_t> slots(plan.slots);
  const std::span<std::uint8_t> first_choices(plan.first_choices);
  const std::span<std::int32_t> send_order(plan.send_order);
  const auto topk = static_cast<std::int64_t>(input.topk);
  const auto num_choices = static_cast<std::int64_t>(ids.size());
  for (std::int64_t base = 0; base < num_choices; base += topk) {
    for (std::int64_t i = base; i < base + topk; ++i) {
      const std::int32_t expert = ids[at(i)];
      if (expert < 0) {
        slots[at(i)] = -1;
        continue;
      }
      Target& target = target_of[at(expert)];
      const std::int32_t place = target.next++;
      slots[at(i)] = target.slot_bias + place;
      send_order[at(place)] = static_cast<std::int32_t>(i);
      std::int64_t& first = firsts[at(target.rank)];
      if (first < base || expert < ids[at(first)]) first = i;
    }
    for (std::int64_t i = base; i < base + topk; ++i) {
      const std::int32_t expert = ids[at(i)];
      const std::int64_t first = expert < 0 ? i : firsts[at(target_of[at(expert)].rank)];
      first_choices[at(i)] = static_cast<std::uint8_t>(first - base);
    }
  }
}

}  // namespace

std::vector<std::int64_t> count_splits(std::span<const std::int32_t> topk_ids, int topk,
                                       int num_experts) {
  std::vector<std::int64_t> splits(at(num_experts), 0);
  for (std::size_t i = 0; i < topk_ids.size(); ++i) {
    const std::int32_t id = topk_ids[i];
    if (id < -1 || id >= num_experts) {
      throw_invalid("topk_ids of token {}, choice {} is {}; ids are 0 to {}, or -1 for masked",
                    i / at(topk), i % at(topk), id, num_experts - 1);
    }
    if (id >= 0) ++splits[at(id)];
  }
  return splits;
}

Plan make_plan(const PlanInput& input) {
  check_input(input);
  const int num_experts = input.placement->num_experts();
  const std::vector<std::int64_t> own = count_splits(input.topk_ids, input.topk, num_experts);
  const auto claimed = input.splits.subspan(at(input.rank) * at(num_experts), at(num_experts));
  for (int expert = 0; expert < num_experts; ++expert) {
    if (own[at(expert)] != claimed[at(expert)]) {
      throw_invalid("splits says rank {} sends {} rows to expert {}, but its topk_ids hold {}",
                    input.rank, claimed[at(expert)], expert, own[at(expert)]);
    }
  }
  Plan plan;
  plan.rank = input.rank;
  plan.num_ranks = input.placement->num_ranks;
  plan.topk = input.topk;
  plan.num_tokens = static_cast<std::int64_t>(input.topk_ids.size()) / input.topk;
  plan_rows(input, plan);
  plan_sends(input, plan);
  return plan;
}

std::vector<RowTile> make_row_tiles(const Plan& plan, std::int64_t tile_m,
                                    std::span<const std::int32_t> expert_order) {
  UNIEP_ASSERT(tile_m > 0);
  std::vector<RowTile> tiles;
  for (const std::int32_t local : expert_order) {
    const std::int64_t rows = plan.expert_rows[at(local)];
    for (std::int64_t first = 0; first < rows; first += tile_m) {
      tiles.push_back({.local_expert = local,
                       .rows = static_cast<std::int32_t>(std::min(tile_m, rows - first)),
                       .row = plan.expert_starts[at(local)] + first});
    }
  }
  return tiles;
}

}  // namespace uniep
