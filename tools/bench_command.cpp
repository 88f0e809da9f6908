// SPDX-License-Identifier: Apache-2.0
// uniep bench: timings of the layer on the CPU, split and fused side by side in one run; on a GPU
// bench_gpu.cpp.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <set>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "bench.hpp"
#include "layer/run_case.hpp"
#include "topo/placement.hpp"
#include "tune.hpp"
#include "uniep_commit.hpp"

namespace uniep::tools {

Traffic traffic_of(const Case& data, Payload payload, int num_ranks) {
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), num_ranks);
  const auto topk = static_cast<std::size_t>(data.topk);
  const auto tokens = tokens_of_ranks(data, num_ranks);
  std::int64_t dispatched = 0;
  std::int64_t returned = 0;
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
        ++returned;
        if (payload == Payload::choice) ++dispatched;
      }
      if (payload == Payload::rank) dispatched += static_cast<std::int64_t>(destinations.size());
    }
  }
  const double bytes_of_row =
      static_cast<double>(data.hidden * dtype_bytes(data.dtype)) / num_ranks;
  return {.dispatched = static_cast<double>(dispatched) * bytes_of_row,
          .returned = static_cast<double>(returned) * bytes_of_row};
}

Spread spread_of(std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  return {.median = ms[ms.size() / 2], .min = ms.front(), .max = ms.back()};
}

nlohmann::json make_record(const BenchFlags& f, const Case& data, const std::string& schedule,
                           const std::string& impl, const Spread& ms) {
  const std::time_t now = std::time(nullptr);
  char time_text[32];
  std::strftime(time_text, sizeof time_text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return {{"op", f.op},
          {"shape", f.options.shape},
          {"tokens", data.num_tokens / f.ranks},
          {"ranks", f.ranks},
          {"routing", f.options.routing},
          {"dtype", f.options.dtype},
          {"schedule", schedule},
          {"impl", impl},
          {"backend", f.layer.backend},
          {"hidden", data.hidden},
          {"ffn", data.ffn},
          {"experts", data.num_experts},
          {"topk", data.topk},
          {"seed", f.options.seed},
          {"numerics", "default"},
          {"ms_median", ms.median},
          {"ms_min", ms.min},
          {"ms_max", ms.max},
          {"runs", f.repeats},
          {"commit", UNIEP_COMMIT},
          {"machine", machine_info()},
          {"time", time_text}};
}

namespace {

double time_ms(const Case& data, const RunOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  static_cast<void>(run_case(data, options));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

int bench_on_cpu(BenchFlags f) {
  if (f.layer.schedule != "auto") static_cast<void>(run_options(f.layer));
  if (f.op != "layer" && f.op != "forward") {
    throw_invalid("--op is {}; on the cpu it can be layer or forward", quote(f.op));
  }
  Report report(f.json);
  const auto num_ranks = static_cast<int>(f.ranks);
  const bool backward = f.op == "layer";
  const Case data = build_case(f.options, num_ranks, backward);
  const std::string from = resolve_auto(f.layer, data, num_ranks);
  const Schedule schedule = run_options(f.layer).schedule;
  struct Candidate {
    std::string impl;
    RunOptions options;
    std::vector<double> ms;
  };
  std::vector<Candidate> candidates;
  // A tuned schedule runs as it is, beside both kinds of the default.
  std::vector<std::string> impls{"fused", "split"};
  if (from == "tuned") impls.insert(impls.begin(), "tuned");
  for (const std::string& impl : impls) {
    if (impl == "split" && f.baseline == "none") continue;
    RunOptions options;
    options.num_ranks = num_ranks;
    options.wait_bound = std::chrono::seconds(f.layer.timeout);
    options.schedule = from == "tuned" && impl != "tuned" ? Schedule{} : schedule;
    if (impl != "tuned") {
      options.schedule.fusion = impl == "fused" ? Fusion::fused : Fusion::split;
    }
    options.backward = backward;
    candidates.push_back({impl, options, {}});
    static_cast<void>(time_ms(data, options));  // first touch of memory stays out of the numbers
  }
  for (std::int64_t i = 0; i < f.repeats; ++i) {
    for (Candidate& c : candidates) c.ms.push_back(time_ms(data, c.options));
  }
  const double flops = (backward ? 18.0 : 6.0) * static_cast<double>(count_rows(data)) *
                       static_cast<double>(data.hidden) * static_cast<double>(data.ffn);
  nlohmann::json records = nlohmann::json::array();
  report.print("{:<8} {:>10} {:>10} {:>10} {:>10}   (all ranks on one machine; set-up included)\n",
               "impl", "median ms", "min", "max", "GFLOP/s");
  for (const Candidate& c : candidates) {
    const Spread ms = spread_of(c.ms);
    report.print("{:<8} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.2f}\n", c.impl, ms.median, ms.min,
                 ms.max, flops / ms.median / 1e6);
    nlohmann::json record = make_record(f, data, to_string(c.options.schedule), c.impl, ms);
    record["tflops"] = flops / ms.median / 1e9;
    const Traffic traffic = traffic_of(data, c.options.schedule.payload, num_ranks);
    const double bytes = (backward ? 2 : 1) * (traffic.dispatched + traffic.returned);
    record["gbps"] = bytes / ms.median / 1e6;
    record["schedule_from"] = from;
    records.push_back(std::move(record));
  }
  report.write({{"schema", 1}, {"records", records}});
  report.publish();
  return 0;
}

int run_bench(BenchFlags f) {
  check_layer_options(f.layer);
  if (f.baseline != "split" && f.baseline != "none") {
    throw_invalid("--baseline is {}; it can be split or none", quote(f.baseline));
  }
  if (f.tokens_per_rank >= 0 && f.options.tokens >= 0) {
    throw_invalid("--tokens-per-rank and --global-tokens say the same thing; give one of them");
  }
  if (f.tokens_per_rank >= 0) f.options.tokens = f.tokens_per_rank * f.ranks;
  if (f.layer.is_cuda() && f.layer.processes) {
    throw_invalid("bench --backend cuda times virtual ranks of one GPU; leave --processes out");
  }
  return f.layer.is_cuda() ? bench_on_gpu(f) : bench_on_cpu(f);
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  auto flags = std::make_shared<BenchFlags>();
  flags->layer.takes_auto = true;
  auto* command = app.add_subcommand("bench", "time the layer or its parts");
  add_case_options(*command, flags->options);
  command
      ->add_option("--op", flags->op,
                   "layer (forward and backward) or forward; on cuda also backward, plan, "
                   "dispatch, combine or grouped_gemm (each product of a rank)")
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
