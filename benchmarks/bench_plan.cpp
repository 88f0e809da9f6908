// SPDX-License-Identifier: Apache-2.0
// The whole plan of one rank on one core: counting its choices and, from every rank's counts, all
// offsets, slots, first choices and the reverse map.
#include "io/routing.hpp"
#include "plan/plan.hpp"
#include "timing.hpp"
#include "topo/placement.hpp"

int main(int argc, char** argv) {
  using namespace uniep;
  using namespace uniep::bench;
  const std::int64_t tokens = flag_value(argc, argv, "--tokens", 8192);  // on each rank
  const auto topk = static_cast<int>(flag_value(argc, argv, "--topk", 8));
  const auto num_experts = static_cast<int>(flag_value(argc, argv, "--experts", 256));
  const auto num_ranks = static_cast<int>(flag_value(argc, argv, "--ranks", 8));
  const auto repeats = static_cast<int>(flag_value(argc, argv, "--repeats", 101));
  const Placement placement = make_contiguous_placement(num_experts, num_ranks);
  const auto choices = static_cast<std::size_t>(tokens * topk);

  fmt::print("{} tokens, topk {}: {} rows; {} experts, {} ranks, 1 thread, {} rounds\n", tokens,
             topk, choices, num_experts, num_ranks, repeats);
  std::vector<std::string> names{"uniform", "zipf:1.2", "W2"};
  std::vector<std::vector<std::int32_t>> ids;
  std::vector<std::vector<std::int64_t>> splits(names.size());
  std::vector<Candidate> candidates;
  std::int64_t sum = 0;  // keeps the plans alive for the optimiser
  for (std::size_t i = 0; i < names.size(); ++i) {
    const Routing routing = make_routing(parse_routing(names[i]), num_ranks, tokens * num_ranks,
                                         num_experts, topk, 0, 1, 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto mine =
          std::span(routing.topk_ids).subspan(static_cast<std::size_t>(rank) * choices, choices);
      const auto row = count_splits(mine, topk, num_experts);
      splits[i].insert(splits[i].end(), row.begin(), row.end());
    }
    ids.emplace_back(routing.topk_ids.begin(),
                     routing.topk_ids.begin() + static_cast<std::ptrdiff_t>(choices));
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    candidates.push_back({names[i],
                          [&, i] {
                            const Plan plan = make_plan({.rank = 0,
                                                         .topk = topk,
                                                         .topk_ids = ids[i],
                                                         .splits = splits[i],
                                                         .placement = &placement});
                            sum += plan.num_rows + plan.slots.back();
                          },
                          {}});
  }
  interleave(candidates, repeats);
  print_header();
  for (const Candidate& candidate : candidates) print_row(candidate);
  fmt::print("target for 65536 rows and 256 experts: at most 0.6 ms   (check sum {})\n", sum);
  return 0;
}
