// SPDX-License-Identifier: Apache-2.0
// uniep simulate: what a layer on GPUs would take, stage by stage, and which schedules would be
// quickest, from a hardware profile.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "io/case.hpp"
#include "layer/run_case.hpp"
#include "schedule/space.hpp"
#include "simulate.hpp"

namespace uniep::tools {
namespace {

using simulate::Parts;
using simulate::Scorer;
using simulate::StageTime;

struct Flags {
  CaseOptions options;
  HardwareOptions where;
  std::string schedule, json;
  std::int64_t ranks = 2, tokens_per_rank = -1, best = 0;
};

void print_parts(Report& report, const std::string& name, const Parts& p) {
  report.print("{:<20} {:>10.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f}   {}\n", name,
               p.total(), p.tensor, p.link, p.hbm, p.tail, p.latency, limit_of(p));
}

int run_simulate(Flags f) {
  const CudaSchedule schedule = parse_cuda_schedule(f.schedule);
  if (f.tokens_per_rank >= 0 && f.options.tokens >= 0) {
    throw_invalid("--tokens-per-rank and --global-tokens say the same thing; give one of them");
  }
  if (f.tokens_per_rank >= 0) f.options.tokens = f.tokens_per_rank * f.ranks;
  Report report(f.json);
  const simulate::Hardware hardware = find_hardware(f.where.profile);
  const Step step = build_step(f.options, static_cast<int>(f.ranks), f.where, hardware);
  const simulate::Load load =
      simulate::load_of(step.sizes, step.topology, step.tokens_per_rank, step.topk_ids);
  const Scorer scorer(hardware, load);
  if (const auto reason = why_illegal(schedule, load.sizes, scorer.limits())) {
    throw_invalid("{}", *reason);
  }
  nlohmann::json json{{"schema", 1},
                      {"hardware", hardware.name},
                      {"ranks", f.ranks},
                      {"schedule", to_string(schedule)},
                      {"skew", load.skew}};
  report.print("{}, {} ranks, {}: microseconds, predicted\n", hardware.name, f.ranks,
               to_string(schedule));
  report.print("{:<20} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9}   {}\n", "", "total", "tensor", "link",
               "hbm", "tail", "latency", "limit");
  for (const bool is_backward : {false, true}) {
    std::vector<StageTime> stages;
    const Parts all =
        is_backward ? scorer.backward(schedule, &stages) : scorer.forward(schedule, &stages);
    const char* name = is_backward ? "backward" : "forward";
    json[name] = to_json(all);
    for (const StageTime& stage : stages) {
      json[name]["stages"][stage.name] = to_json(stage.parts);
      print_parts(report, fmt::format("  {}", stage.name), stage.parts);
    }
    print_parts(report, name, all);
  }
  if (f.best > 0) {
    const auto all = legal_cuda_schedules(load.sizes, scorer.limits(), schedule);
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t i = 0; i < all.size(); ++i) {
      order.emplace_back(scorer.layer(all[i]).total(), i);
    }
    const auto count = std::min(order.size(), static_cast<std::size_t>(f.best));
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count),
                      order.end());
    report.print("\nThe best of {} legal schedules, forward and backward:\n", all.size());
    for (std::size_t i = 0; i < count; ++i) {
      const CudaSchedule& s = all[order[i].second];
      report.print("{:>10.1f}  {}\n", order[i].first, to_string(s));
      json["best"].push_back({{"us", order[i].first}, {"schedule", to_string(s)}});
    }
  }
  report.write(json);
  report.publish();
  return 0;
}

simulate::Topology topology_of(int ranks, const HardwareOptions& where,
                               const simulate::Hardware& hardware) {
  if (ranks % where.ranks_per_gpu != 0) {
    throw_invalid("--ranks-per-gpu is {}, which does not divide the {} ranks", where.ranks_per_gpu,
                  ranks);
  }
  return {.ranks = ranks,
          .ranks_per_gpu = static_cast<int>(where.ranks_per_gpu),
          .gpus_per_node = static_cast<int>(hardware.gpus_per_node)};
}

}  // namespace

void add_hardware_options(CLI::App& app, HardwareOptions& o) {
  app.add_option("--hw", o.profile,
                 "hardware profile: h200, h100, or a file (hw/h200.json is an example)")
      ->type_name("NAME|FILE")
      ->capture_default_str();
  add_number(app, "--ranks-per-gpu", o.ranks_per_gpu, 1, 16, "virtual ranks that share a GPU");
}

simulate::Hardware find_hardware(const std::string& profile) {
  if (profile.find('/') != std::string::npos || profile.ends_with(".json")) {
    return simulate::load_hardware(profile);
  }
  // Of an installation, beside the program; of a build, in the source tree.
  std::error_code error;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
  for (const std::filesystem::path& folder :
       {(program.parent_path() / UNIEP_INSTALLED_HW).lexically_normal(),
        std::filesystem::path(UNIEP_SOURCE_HW)}) {
    const auto path = folder / (profile + ".json");
    if (std::filesystem::exists(path, error)) return simulate::load_hardware(path.string());
  }
  throw_invalid("--hw is {}; it can be h200, h100 or a file such as hw/h200.json", quote(profile));
}

Step build_step(const CaseOptions& options, int ranks, const HardwareOptions& where,
                const simulate::Hardware& hardware) {
  const Shape shape = resolve_shape(options);
  Routing routing = make_routing(parse_routing(options.routing), ranks, shape.tokens,
                                 static_cast<int>(shape.experts), static_cast<int>(shape.topk),
                                 options.mask, options.seed, 0);
  Step step;
  step.topology = topology_of(ranks, where, hardware);
  step.sizes = {
      .tokens = *std::max_element(routing.tokens_per_rank.begin(), routing.tokens_per_rank.end()),
      .hidden = shape.hidden,
      .ffn = shape.ffn,
      .experts = shape.experts,
      .topk = static_cast<int>(shape.topk),
      .ranks = ranks,
      .dtype = parse_dtype(options.dtype)};
  step.tokens_per_rank = std::move(routing.tokens_per_rank);
  step.topk_ids = std::move(routing.topk_ids);
  return step;
}

Step step_of(const Case& data, int ranks, const HardwareOptions& where,
             const simulate::Hardware& hardware) {
  Step step;
  step.topology = topology_of(ranks, where, hardware);
  step.tokens_per_rank = tokens_of_ranks(data, ranks);
  step.sizes = {
      .tokens = *std::max_element(step.tokens_per_rank.begin(), step.tokens_per_rank.end()),
      .hidden = data.hidden,
      .ffn = data.ffn,
      .experts = data.num_experts,
      .topk = static_cast<int>(data.topk),
      .ranks = ranks,
      .dtype = data.dtype};
  step.topk_ids = data.topk_ids;
  return step;
}

nlohmann::json to_json(const Parts& parts) {
  nlohmann::json json{{"us", parts.total()}, {"limit", limit_of(parts)}};
  for (const auto& [name, part] : simulate::kParts) json[name] = parts.*part;
  return json;
}

void add_simulate(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command =
      app.add_subcommand("simulate", "predict a layer's time on GPUs, in parts, without one");
  add_case_options(*command, flags->options);
  add_number(*command, "--tokens-per-rank", flags->tokens_per_rank, 0, kMaxTokensFlag,
             "tokens of each rank", "the shape's");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks");
  add_hardware_options(*command, flags->where);
  command->add_option("--schedule", flags->schedule, "as with --backend cuda; see uniep run --help")
      ->type_name("K=V,…");
  add_number(*command, "--best", flags->best, 0, 1000, "also list so many of the quickest");
  add_json_option(*command, flags->json, "the prediction");
  command->callback([&run, flags] { run = [flags] { return run_simulate(*flags); }; });
}

}  // namespace uniep::tools
