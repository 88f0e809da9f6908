// SPDX-License-Identifier: Apache-2.0
// uniep bench: timings of the layer on the CPU, split and fused side by side in one run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <set>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "commands.hpp"
#include "layer/run_case.hpp"
#include "topo/placement.hpp"
#include "uniep_commit.hpp"

namespace uniep::tools {
namespace {

struct Flags {
  CaseOptions options;
  LayerOptions layer;
  std::string op = "layer", baseline = "split", json;
  std::int64_t tokens_per_rank = -1;  // -1: the shape's, split over the ranks
  std::int64_t ranks = 2, repeats = 15;
};

double time_ms(const Case& data, const RunOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  static_cast<void>(run_case(data, options));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

// Bytes of rows that leave the average rank for another in one forward: dispatched, then returned.
double bytes_between_ranks(const Case& data, const Schedule& schedule, int num_ranks) {
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), num_ranks);
  const auto topk = static_cast<std::size_t>(data.topk);
  const auto tokens = tokens_of_ranks(data, num_ranks);
  std::int64_t rows = 0;
  std::size_t token = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const std::size_t end =
        token + static_cast<std::size_t>(tokens[static_cast<std::size_t>(rank)]);
    for (; token < end; ++token) {
      std::set<int> destinations;
      for (std::size_t i = token * topk; i < (token + 1) * topk; ++i) {
        if (data.topk_ids[i] < 0) continue;
        const int owner = placement.rank_of[static_cast<std::size_t>(data.topk_ids[i])];
        if (owner == rank) continue;
        destinations.insert(owner);
        rows += schedule.payload == Payload::choice ? 2 : 1;
      }
      if (schedule.payload == Payload::rank) rows += static_cast<std::int64_t>(destinations.size());
    }
  }
  return static_cast<double>(rows) * static_cast<double>(data.hidden * dtype_bytes(data.dtype)) /
         num_ranks;
}

int run_bench(const Flags& f) {
  const Schedule schedule = cpu_run_options(f.layer, "bench").schedule;
  if (f.op != "layer" && f.op != "forward") {
    throw_invalid("--op is {}; on the cpu it can be layer or forward", quote(f.op));
  }
  if (f.baseline != "split" && f.baseline != "none") {
    throw_invalid("--baseline is {}; on the cpu it can be split or none", quote(f.baseline));
  }
  if (f.tokens_per_rank >= 0 && f.options.tokens >= 0) {
    throw_invalid("--tokens-per-rank and --global-tokens say the same thing; give one of them");
  }
  Report report(f.json);
  const auto num_ranks = static_cast<int>(f.ranks);
  CaseOptions case_options = f.options;
  if (f.tokens_per_rank >= 0) case_options.tokens = f.tokens_per_rank * f.ranks;
  const bool backward = f.op == "layer";
  const Case data = build_case(case_options, num_ranks, backward);
  struct Candidate {
    std::string impl;
    RunOptions options;
    std::vector<double> ms;
  };
  std::vector<Candidate> candidates;
  for (const char* impl : {"fused", "split"}) {
    if (std::string_view(impl) == "split" && f.baseline == "none") continue;
    RunOptions options;
    options.num_ranks = num_ranks;
    options.wait_bound = std::chrono::seconds(f.layer.timeout);
    options.schedule = schedule;
    options.schedule.fusion = std::string_view(impl) == "fused" ? Fusion::fused : Fusion::split;
    options.backward = backward;
    candidates.push_back({impl, options, {}});
    static_cast<void>(time_ms(data, options));  // first touch of memory stays out of the numbers
  }
  for (std::int64_t i = 0; i < f.repeats; ++i) {
    for (Candidate& c : candidates) c.ms.push_back(time_ms(data, c.options));
  }
  std::int64_t rows = 0;
  for (const std::int32_t id : data.topk_ids) rows += id >= 0 ? 1 : 0;
  const double flops = (backward ? 18.0 : 6.0) * static_cast<double>(rows) *
                       static_cast<double>(data.hidden) * static_cast<double>(data.ffn);
  const double bytes = (backward ? 2 : 1) * bytes_between_ranks(data, schedule, num_ranks);
  nlohmann::json records = nlohmann::json::array();
  report.print("{:<8} {:>10} {:>10} {:>10} {:>10}   (all ranks on one machine; set-up included)\n",
               "impl", "median ms", "min", "max", "GFLOP/s");
  for (Candidate& c : candidates) {
    std::sort(c.ms.begin(), c.ms.end());
    const double median = c.ms[c.ms.size() / 2];
    report.print("{:<8} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.2f}\n", c.impl, median, c.ms.front(),
                 c.ms.back(), flops / median / 1e6);
    records.push_back({{"op", f.op},
                       {"shape", case_options.shape},
                       {"tokens", data.num_tokens / f.ranks},
                       {"ranks", f.ranks},
                       {"routing", case_options.routing},
                       {"dtype", case_options.dtype},
                       {"schedule", to_string(c.options.schedule)},
                       {"impl", c.impl},
                       {"backend", "cpu"},
                       {"hidden", data.hidden},
                       {"ffn", data.ffn},
                       {"experts", data.num_experts},
                       {"topk", data.topk},
                       {"seed", case_options.seed},
                       {"numerics", "default"},
                       {"ms_median", median},
                       {"ms_min", c.ms.front()},
                       {"ms_max", c.ms.back()},
                       {"runs", f.repeats},
                       {"tflops", flops / median / 1e9},
                       {"gbps", bytes / median / 1e6},
                       {"commit", UNIEP_COMMIT},
                       {"machine", machine_info()},
                       {"time", now_text()}});
  }
  report.write({{"schema", 1}, {"records", records}});
  report.publish();
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("bench", "time the layer, fused and split in one run");
  add_case_options(*command, flags->options);
  command->add_option("--op", flags->op, "layer (forward and backward) or forward")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  add_number(*command, "--tokens-per-rank", flags->tokens_per_rank, 0, kMaxTokensFlag,
             "tokens of each rank", "the shape's");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks");
  add_number(*command, "--repeats", flags->repeats, 1, 10000, "timed runs, interleaved");
  add_layer_options(*command, flags->layer);
  command->add_option("--baseline", flags->baseline, "what to time beside fused: split or none")
      ->type_name("NAME")
      ->capture_default_str();
  add_json_option(*command, flags->json, "the records");
  command->callback([&run, flags] { run = [flags] { return run_bench(*flags); }; });
}

}  // namespace uniep::tools
