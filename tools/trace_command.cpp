// SPDX-License-Identifier: Apache-2.0
// uniep trace: runs a case and shows who did what when.
#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "commands.hpp"
#include "io/output_file.hpp"
#include "layer/run_case.hpp"
#include "simulate.hpp"
#include "simulate/event_run.hpp"
#include "timeline/ceilings.hpp"
#include "timeline/timeline.hpp"

namespace uniep::tools {
namespace {

struct Flags {
  CaseOptions options;
  LayerOptions layer;
  std::string input, output, svg, json;
  std::int64_t ranks = 0;  // 0: the file's, or 4
  std::int64_t rounds = 2;
  std::int64_t records = kTraceCapacity;
  bool simulate = false;
  HardwareOptions where;
};

void check_paths(const Flags& f) {
  check_distinct(f.output, f.json);
  check_distinct(f.output, f.svg, "-o", "--svg");
  check_distinct(f.svg, f.json, "--svg", "--json");
  if (f.svg == "-") throw_invalid("--svg is '-'; give a file for the picture");
  if (f.output == "-" && f.json == "-") {
    throw_invalid("-o and --json are both '-'; only one can go to standard output");
  }
}

std::string name_of(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

// A GPU's run on a virtual clock instead of one on this CPU.
int simulate_trace(const Flags& f) {
  if (f.layer.processes) throw_invalid("--processes is for runs; --simulate has none");
  const CudaSchedule schedule = parse_cuda_schedule(f.layer.schedule);
  check_paths(f);
  Report events(f.output);
  Report report(f.output == "-" && f.json.empty() ? "/dev/null" : f.json);
  std::optional<OutputFile> svg;
  if (!f.svg.empty()) svg.emplace("SVG file", f.svg);
  const simulate::Hardware hardware = find_hardware(f.where.profile);
  const auto build = [&] {
    if (f.input.empty()) {
      return build_step(f.options, static_cast<int>(f.ranks > 0 ? f.ranks : 4), f.where, hardware);
    }
    const Case data = load_case(f.input);
    const auto own = std::max<std::size_t>(1, data.tokens_per_rank.size());
    return step_of(data, f.ranks > 0 ? static_cast<int>(f.ranks) : static_cast<int>(own), f.where,
                   hardware);
  };
  const Step step = build();
  const simulate::EventRun run = simulate::run_events(hardware, step.sizes, step.topology, schedule,
                                                      step.tokens_per_rank, step.topk_ids, true);
  TimelineInfo info;
  info.title = fmt::format(
      "{} predicted on {}: {} tokens a rank, {} experts, topk {}, hidden {}, "
      "ffn {}, {} rank{}",
      f.input.empty() ? f.options.shape : name_of(f.input), hardware.name, step.sizes.tokens,
      step.sizes.experts, step.sizes.topk, step.sizes.hidden, step.sizes.ffn, step.sizes.ranks,
      step.sizes.ranks == 1 ? "" : "s");
  info.schedule = to_string(schedule);
  info.num_ranks = step.sizes.ranks;
  const double gpus = static_cast<double>(step.sizes.ranks) / step.topology.ranks_per_gpu;
  info.ceilings = {
      .flops_per_s = gpus * hardware.sms * 2 * 128 * 256 * 64 / hardware.mma_step_us * 1e6,
      .link_bytes_per_s = gpus * hardware.link_push.points().back().second * 1e6,
      .origin = "of the profile of " + hardware.name};
  events.write(trace_json(run.trace, info));
  if (svg) {
    const std::string picture = trace_svg(run.trace, info);
    svg->write(std::as_bytes(std::span(picture)));
    svg->sync();
  }
  report.write({{"schema", 1},
                {"output", f.output},
                {"svg", f.svg},
                {"events", run.trace.events.size()},
                {"ranks", step.sizes.ranks},
                {"hardware", hardware.name},
                {"forward_us", run.forward_us},
                {"backward_us", run.backward_us},
                {"schedule", info.schedule}});
  events.publish();
  if (svg) svg->publish();
  if (f.output != "-") {
    report.print(
        "{}: predicted forward {:.1f} us, backward {:.1f} us; open it at "
        "ui.perfetto.dev\n",
        f.output, run.forward_us, run.backward_us);
    if (svg) report.print("{}: a picture, for any browser\n", f.svg);
  }
  report.publish();
  return 0;
}

int run_trace(const Flags& f) {
  if (f.simulate) return simulate_trace(f);
  RunOptions options = cpu_run_options(f.layer, "trace");
  options.backward = true;
  options.repeats = static_cast<int>(f.rounds);
  options.trace_capacity = f.records;
  check_paths(f);
  Report events(f.output);
  Report report(f.output == "-" && f.json.empty() ? "/dev/null" : f.json);
  std::optional<OutputFile> svg;
  if (!f.svg.empty()) svg.emplace("SVG file", f.svg);

  options.num_ranks = static_cast<int>(f.ranks > 0 ? f.ranks : 4);
  std::optional<Case> loaded;
  if (!f.input.empty()) {
    loaded = load_case(f.input);
    if (f.ranks == 0 && !loaded->tokens_per_rank.empty()) {
      options.num_ranks = static_cast<int>(loaded->tokens_per_rank.size());
    }
  }
  const Case data = loaded ? std::move(*loaded) : build_case(f.options, options.num_ranks, true);
  TimelineInfo info;
  info.title = fmt::format("{}: {} tokens, {} experts, topk {}, hidden {}, ffn {}, {} rank{}",
                           f.input.empty() ? f.options.shape : name_of(f.input), data.num_tokens,
                           data.num_experts, data.topk, data.hidden, data.ffn, options.num_ranks,
                           options.num_ranks == 1 ? "" : "s");
  info.schedule = to_string(options.schedule);
  info.num_ranks = options.num_ranks;
  info.workers = options.schedule.workers;
  info.comm_workers = options.schedule.comm_workers;
  info.ceilings = measure_ceilings(options.schedule, data.dtype, data.hidden,
                                   options.num_ranks * options.schedule.workers);
  Trace trace;
  options.trace = &trace;
  std::optional<Error> failure;
  try {
    static_cast<void>(run_case(data, options));
  } catch (const Error& error) {
    // A run that failed on the way is what one most wants to see.
    if (trace.events.empty()) throw;
    failure = error;
    info.title += ": FAILED";
  }
  events.write(trace_json(trace, info));
  if (svg) {
    const std::string picture = trace_svg(trace, info);
    svg->write(std::as_bytes(std::span(picture)));
    svg->sync();
  }
  report.write({{"schema", 1},
                {"output", f.output},
                {"svg", f.svg},
                {"events", trace.events.size()},
                {"dropped", trace.dropped},
                {"ranks", options.num_ranks},
                {"failed", failure.has_value()},
                {"schedule", info.schedule}});
  events.publish();
  if (svg) svg->publish();
  if (f.output != "-") {
    report.print("{}: {} events of {} ranks; open it at ui.perfetto.dev\n", f.output,
                 trace.events.size(), options.num_ranks);
    if (svg) report.print("{}: a picture, for any browser\n", f.svg);
    if (trace.dropped > 0) {
      report.print("{} older events were not kept; --records takes more\n", trace.dropped);
    }
  }
  report.publish();
  if (failure) throw Error(*failure);
  return 0;
}

}  // namespace

void add_trace(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("trace", "write who did what when, and who waited for whom");
  add_case_options(*command, flags->options);
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  const auto of_random_case = command->get_options(
      [](const CLI::Option* option) { return option->get_name() != "--help"; });
  command->add_option("CASE", flags->input,
                      "tensor file (safetensors) with d_out, instead of a random case");
  command->add_option("-o,--output", flags->output, "trace-event JSON file to write, for Perfetto")
      ->type_name("FILE")
      ->required();
  command->add_option("--svg", flags->svg, "picture to write")->type_name("FILE");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks", "the file's, or 4");
  add_number(*command, "--rounds", flags->rounds, 1, 1000,
             "forward and backward so many times; the last is shown");
  add_number(*command, "--records", flags->records, 1, kMaxTraceCapacity,
             "records kept of a worker and pass, the last ones; 64 bytes each");
  command->add_flag(
      "--simulate", flags->simulate,
      "predict a GPU's run on a virtual clock; --schedule is one of the cuda backend");
  add_hardware_options(*command, flags->where);
  add_layer_options(*command, flags->layer);
  add_json_option(*command, flags->json, "a summary");
  const CLI::Option* hardware = command->get_option("--hw");
  command->callback([&run, flags, of_random_case, hardware] {
    if (!flags->simulate && hardware->count() > 0) {
      throw_invalid("--hw is for --simulate; a run is on this machine");
    }
    for (const CLI::Option* option : of_random_case) {
      if (!flags->input.empty() && option->count() > 0) {
        throw_invalid("{} and a case file are both given; the file says what is run",
                      option->get_name());
      }
    }
    run = [flags] { return run_trace(*flags); };
  });
}

}  // namespace uniep::tools
