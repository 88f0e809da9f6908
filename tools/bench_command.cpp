// SPDX-License-Identifier: Apache-2.0
// uniep bench: timings of the layer on the CPU, split and fused side by side in one run.
#include <fmt/format.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "commands.hpp"
#include "layer/run_case.hpp"

namespace uniep::tools {
namespace {

struct Flags {
  CaseOptions options;
  std::string op = "layer", schedule, baseline = "split", json, backend = "cpu";
  std::int64_t tokens_per_rank = -1;
  int ranks = 2, repeats = 15;
};

double time_ms(const Case& data, const RunOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  static_cast<void>(run_case(data, options));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

int run_bench(const Flags& f) {
  check_backend(f.backend);
  if (f.op != "layer" && f.op != "forward") {
    throw_invalid("--op is '{}'; on the cpu it can be layer or forward", f.op);
  }
  if (f.baseline != "split" && f.baseline != "none") {
    throw_invalid("--baseline is '{}'; on the cpu it can be split or none", f.baseline);
  }
  if (f.repeats < 1 || f.repeats > 10000) {
    throw_invalid("--repeats is {}; it must be 1 to 10000", f.repeats);
  }
  if (f.ranks < 1 || f.ranks > kMaxRanks) {
    throw_invalid("--ranks is {}; it must be 1 to {}", f.ranks, kMaxRanks);
  }
  CaseOptions case_options = f.options;
  if (f.tokens_per_rank >= 0) case_options.tokens = f.tokens_per_rank * f.ranks;
  const bool backward = f.op == "layer";
  const Case data = build_case(case_options, f.ranks, backward);
  struct Candidate {
    std::string impl;
    RunOptions options;
    std::vector<double> ms;
  };
  std::vector<Candidate> candidates;
  const Schedule schedule = parse_schedule(f.schedule);
  for (const char* impl : {"fused", "split"}) {
    if (std::string_view(impl) == "split" && f.baseline == "none") continue;
    RunOptions options;
    options.num_ranks = f.ranks;
    options.schedule = schedule;
    options.schedule.fusion = std::string_view(impl) == "fused" ? Fusion::fused : Fusion::split;
    options.backward = backward;
    candidates.push_back({impl, options, {}});
    static_cast<void>(time_ms(data, options));  // first touch of memory stays out of the numbers
  }
  for (int i = 0; i < f.repeats; ++i) {
    for (Candidate& c : candidates) c.ms.push_back(time_ms(data, c.options));
  }
  std::int64_t rows = 0;
  for (const std::int32_t id : data.topk_ids) rows += id >= 0 ? 1 : 0;
  const double flops = (backward ? 18.0 : 6.0) * static_cast<double>(rows) *
                       static_cast<double>(data.hidden) * static_cast<double>(data.ffn);
  nlohmann::json records = nlohmann::json::array();
  fmt::print("{:<8} {:>10} {:>10} {:>10} {:>10}   (all ranks on one machine; set-up included)\n",
             "impl", "median ms", "min", "max", "GFLOP/s");
  for (Candidate& c : candidates) {
    std::sort(c.ms.begin(), c.ms.end());
    const double median = c.ms[c.ms.size() / 2];
    fmt::print("{:<8} {:>10.3f} {:>10.3f} {:>10.3f} {:>10.2f}\n", c.impl, median, c.ms.front(),
               c.ms.back(), flops / median / 1e6);
    records.push_back({{"op", f.op}, {"shape", case_options.shape},
                       {"tokens", data.num_tokens / f.ranks}, {"ranks", f.ranks},
                       {"routing", case_options.routing}, {"dtype", case_options.dtype},
                       {"schedule", to_string(c.options.schedule)}, {"impl", c.impl},
                       {"backend", "cpu"}, {"hidden", data.hidden}, {"ffn", data.ffn},
                       {"experts", data.num_experts}, {"topk", data.topk},
                       {"seed", case_options.seed}, {"numerics", "default"},
                       {"ms_median", median}, {"ms_min", c.ms.front()}, {"ms_max", c.ms.back()},
                       {"runs", f.repeats}, {"tflops", flops / median / 1e9},
                       {"machine", machine_info()}, {"time", now_text()}});
  }
  write_json(f.json, {{"schema", 1}, {"records", records}});
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("bench", "time the layer, fused and split in one run");
  add_case_options(*command, flags->options);
  command->add_option("--op", flags->op, "layer (forward and backward) or forward")
      ->capture_default_str();
  command->add_option("--backend", flags->backend, "cpu or cuda")->capture_default_str();
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")->capture_default_str();
  command->add_option("--tokens-per-rank", flags->tokens_per_rank, "tokens on each rank");
  command->add_option("--ranks", flags->ranks, "ranks")->capture_default_str();
  command->add_option("--repeats", flags->repeats, "timed runs, interleaved")
      ->capture_default_str();
  command->add_option("--schedule", flags->schedule, "key=value,…");
  command->add_option("--baseline", flags->baseline, "split or none")->capture_default_str();
  command->add_option("--json", flags->json, "write the records to FILE, - for stdout");
  command->callback([&run, flags] { run = [flags] { return run_bench(*flags); }; });
}

}  // namespace uniep::tools
