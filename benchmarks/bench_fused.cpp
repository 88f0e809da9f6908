// SPDX-License-Identifier: Apache-2.0
// The layer forward and backward with the fused and the split schedule.
#include "layer_rounds.hpp"
#include "timing.hpp"

int main(int argc, char** argv) {
  using namespace uniep;
  using namespace uniep::bench;
  const auto num_ranks = static_cast<int>(flag_value(argc, argv, "--ranks", 2));
  const auto repeats = static_cast<int>(flag_value(argc, argv, "--repeats", 15));
  const Shape shape{.name = "",
                    .hidden = flag_value(argc, argv, "--hidden", 512),
                    .ffn = flag_value(argc, argv, "--ffn", 384),
                    .experts = flag_value(argc, argv, "--experts", 16),
                    .topk = flag_value(argc, argv, "--topk", 4),
                    .tokens = num_ranks * flag_value(argc, argv, "--tokens-per-rank", 512)};
  fmt::print(
      "f32 layer forward and backward: {} ranks of {} tokens, hidden {}, ffn {}, {} experts, "
      "topk {}, {} rounds\n",
      num_ranks, shape.tokens / num_ranks, shape.hidden, shape.ffn, shape.experts, shape.topk,
      repeats);
  for (const char* routing : {"uniform", "zipf:1.2"}) {
    const Case data = make_case(shape, DType::f32, parse_routing(routing), num_ranks, 0, 1, true);
    Schedule split;
    split.fusion = Fusion::split;
    split.workers = static_cast<std::int32_t>(flag_value(argc, argv, "--workers", 1));
    Schedule fused = split;
    fused.fusion = Fusion::fused;
    bench::Layer split_layer(data, num_ranks, split);
    bench::Layer fused_layer(data, num_ranks, fused);
    std::vector<Candidate> candidates{
        {fmt::format("{}, fused", routing), [&] { fused_layer.run(); }, {}},
        {fmt::format("{}, split", routing), [&] { split_layer.run(); }, {}}};
    interleave(candidates, repeats);
    print_header();
    for (const Candidate& candidate : candidates) print_row(candidate);
    fmt::print("fused / split                {:>10.3f}   (target: at most 1.05)\n",
               median(candidates[0]) / median(candidates[1]));
  }
  return 0;
}
