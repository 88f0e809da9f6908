// SPDX-License-Identifier: Apache-2.0
// What recording costs: one record, and the layer with records over the layer without.
#include <cmath>

#include "cpu/recorder.hpp"
#include "layer_rounds.hpp"
#include "timing.hpp"

namespace {

using namespace uniep;
using namespace uniep::bench;

// Nanoseconds of an empty task's record, over a ring that is in no cache.
double record_ns() {
  constexpr int kRecords = 1 << 20;
  cpu::Recorder recorder(0, 1, kRecords);
  double best = 1e9;
  for (int round = 0; round < 5; ++round) {
    recorder.begin(Pass::forward);
    best = std::min(best, 1e6 / kRecords * elapsed_ms([&] {
                            for (int i = 0; i < kRecords; ++i) {
                              cpu::RecordedSpan span(recorder, TraceKind::task);
                              span.event.index = i;
                            }
                          }));
  }
  return best;
}

struct Problem {
  const char* name;
  Shape shape;
  const char* schedule;
};

void compare(const Problem& p, int num_ranks, int repeats, double ns) {
  const Schedule schedule = parse_schedule(p.schedule);
  const Case data = make_case(p.shape, DType::f32, parse_routing("uniform"), num_ranks, 0, 1, true);
  bench::Layer on(data, num_ranks, schedule, kTraceCapacity);
  bench::Layer off(data, num_ranks, schedule);
  // Of each round, the one over the other: a machine that slows down slows both.
  std::vector<double> ratios;
  double on_ms = 0, off_ms = 0;
  on.run();
  off.run();
  for (int i = 0; i < repeats; ++i) {
    double with = 0, without = 0;
    if (i % 2 == 0) with = elapsed_ms([&] { on.run(); });
    without = elapsed_ms([&] { off.run(); });
    if (i % 2 != 0) with = elapsed_ms([&] { on.run(); });
    ratios.push_back(with / without);
    on_ms += with;
    off_ms += without;
  }
  std::sort(ratios.begin(), ratios.end());
  const auto quantile = [&](double q) {
    return ratios[static_cast<std::size_t>(q * static_cast<double>(ratios.size() - 1))];
  };
  const auto records = static_cast<double>(on.count_records());
  const int cores =
      std::min(static_cast<int>(std::thread::hardware_concurrency()), num_ranks * schedule.workers);
  fmt::print("{:<36} {:>9.3f} {:>9.3f} {:>8.4f} {:>7.3f} {:>7.3f} {:>9} {:>9.2f} %\n", p.name,
             on_ms / repeats, off_ms / repeats, quantile(0.5), quantile(0.25), quantile(0.75),
             records, 100 * records * ns / (1e6 * on_ms / repeats * cores));
}

}  // namespace

int main(int argc, char** argv) {
  const auto num_ranks = static_cast<int>(flag_value(argc, argv, "--ranks", 2));
  const auto repeats = static_cast<int>(flag_value(argc, argv, "--repeats", 41));
  const auto tokens = [num_ranks](std::int64_t each) { return each * num_ranks; };
  const double ns = record_ns();
  fmt::print("one record: {:.1f} ns\n", ns);
  fmt::print("f32 layer forward and backward, {} ranks, {} rounds\n", num_ranks, repeats);
  fmt::print("{:<36} {:>9} {:>9} {:>8} {:>7} {:>7} {:>9} {:>11}\n", "", "on, ms", "off, ms",
             "on/off", "q25", "q75", "records", "their time");
  compare({"512 tokens, H 512, F 384, fused",
           {.name = "", .hidden = 512, .ffn = 384, .experts = 16, .topk = 4, .tokens = tokens(512)},
           "workers=1"},
          num_ranks, repeats, ns);
  compare({"the same, split",
           {.name = "", .hidden = 512, .ffn = 384, .experts = 16, .topk = 4, .tokens = tokens(512)},
           "fusion=split"},
          num_ranks, repeats, ns);
  compare({"the same, smallest tiles, 2 workers",
           {.name = "", .hidden = 512, .ffn = 384, .experts = 16, .topk = 4, .tokens = tokens(512)},
           "workers=2,tile_m=8,tile_n=64,chunk=1"},
          num_ranks, repeats, ns);
  compare({"512 tokens, H 64, F 48, fused",
           {.name = "", .hidden = 64, .ffn = 48, .experts = 8, .topk = 2, .tokens = tokens(512)},
           "workers=1"},
          num_ranks, 10 * repeats, ns);
  fmt::print(
      "on/off: median over rounds, with quartiles (target: at most 1.02); their time: records "
      "of a round\ntimes the time of one, over the time of all cores\n");
  return 0;
}
