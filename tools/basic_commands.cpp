// SPDX-License-Identifier: Apache-2.0
// uniep info, case, run and trace.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "base/error.hpp"
#include "commands.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"

namespace uniep::tools {
namespace {

void print_hashes(const CaseResult& result, bool backward) {
  const auto hashes = hash_results(result);
  for (std::size_t i = 0; i < (backward ? hashes.size() : 1); ++i) {
    fmt::print("{:<15} {:016x}\n", kResultNames[i], hashes[i]);
  }
}

TensorFile to_file(const Case& c, const CaseResult& result, bool backward) {
  const std::vector<std::int64_t> tokens{c.num_tokens, c.hidden};
  TensorFile file;
  file.metadata = {{"uniep_format", "1"}, {"numerics", "default"}};
  file.tensors["out"] = {c.dtype, tokens, result.out};
  if (!backward) return file;
  file.tensors["d_x"] = {c.dtype, tokens, result.d_x};
  file.tensors["d_topk_weights"] =
      make_tensor(DType::f32, {c.num_tokens, c.topk}, result.d_topk_weights);
  file.tensors["d_w1"] = make_tensor(DType::f32, {c.num_experts, 2 * c.ffn, c.hidden}, result.d_w1);
  file.tensors["d_w2"] = make_tensor(DType::f32, {c.num_experts, c.hidden, c.ffn}, result.d_w2);
  return file;
}

struct RunFlags {
  std::string input, output, json, backend = "cpu", schedule, numerics = "default";
  int ranks = 0;
  bool backward = false;
};

int run_layer(const RunFlags& f) {
  check_backend(f.backend);
  check_numerics(f.numerics);
  const Schedule schedule = parse_schedule(f.schedule);
  const Case data = load_case(f.input);
  RunOptions options;
  options.num_ranks = f.ranks > 0 ? f.ranks : std::max(1, static_cast<int>(data.tokens_per_rank.size()));
  options.schedule = schedule;
  options.backward = f.backward;
  const CaseResult result = run_case(data, options);
  write_tensor_file(f.output, to_file(data, result, f.backward));
  const auto hashes = hash_results(result);
  nlohmann::json json{{"schema", 1},          {"ranks", options.num_ranks},
                      {"schedule", to_string(schedule)}, {"output", f.output}};
  for (std::size_t i = 0; i < (f.backward ? hashes.size() : 1); ++i) {
    json["hashes"][kResultNames[i]] = fmt::format("{:016x}", hashes[i]);
  }
  if (f.json != "-") print_hashes(result, f.backward);
  write_json(f.json, json);
  return 0;
}

// Trace-event JSON (the format of chrome://tracing, which Perfetto reads): a process a rank, a
// thread a worker, microseconds from the first event.
nlohmann::json trace_events(const std::vector<TraceEvent>& events) {
  std::int64_t start = events.empty() ? 0 : events.front().start_ns;
  for (const auto& event : events) start = std::min(start, event.start_ns);
  nlohmann::json list = nlohmann::json::array();
  for (const auto& event : events) {
    list.push_back({{"name", to_string(event.task.role)},
                    {"ph", "X"},
                    {"pid", event.task.rank},
                    {"tid", event.task.worker},
                    {"ts", static_cast<double>(event.start_ns - start) / 1000.0},
                    {"dur", static_cast<double>(event.end_ns - event.start_ns) / 1000.0},
                    {"args", {{"index", event.task.index}}}});
  }
  return {{"traceEvents", list}, {"displayTimeUnit", "ns"}};
}

}  // namespace

void add_info(CLI::App& app, Run& run) {
  auto* command = app.add_subcommand("info", "the machine, the build, and what can run here");
  auto* json = command->add_option("--json", "write the facts as JSON to FILE, - for stdout")
                   ->type_name("FILE");
  command->callback([&run, json] {
    run = [json] {
      nlohmann::json info = machine_info();
      info["schema"] = 1;
      info["backends"] = {{"cpu", "ok"},
                          {"cuda", "no: the layer is not served on cuda by this build"}};
      info["providers"] = {{"host", "ok: ranks as threads of one process"}};
      const std::string file = json->count() > 0 ? json->as<std::string>() : "";
      if (file != "-") {
        for (const auto& [key, value] : info.items()) {
          fmt::print("{:<22} {}\n", key, value.is_string() ? value.get<std::string>() : value.dump());
        }
      }
      write_json(file, info);
      return 0;
    };
  });
}

void add_case(CLI::App& app, Run& run) {
  struct Flags {
    CaseOptions options;
    std::string output;
    std::string json;
    int ranks = 1;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("case", "write a random case of a shape and a routing");
  add_case_options(*command, flags->options);
  command->add_option("-o,--output", flags->output, "tensor file to write")->required();
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")->capture_default_str();
  command->add_option("--ranks", flags->ranks, "ranks that the tokens are split over")
      ->capture_default_str();
  command->add_option("--json", flags->json, "write a summary as JSON to FILE, - for stdout");
  command->callback([&run, flags] {
    run = [flags] {
      if (flags->ranks < 1 || flags->ranks > kMaxRanks) {
        throw_invalid("--ranks is {}; it must be 1 to {}", flags->ranks, kMaxRanks);
      }
      const Case data = build_case(flags->options, flags->ranks, true);
      save_case(flags->output, data);
      if (flags->json != "-") {
        fmt::print("{}: {} tokens, hidden {}, ffn {}, {} experts, topk {}, {} ranks\n",
                   flags->output, data.num_tokens, data.hidden, data.ffn, data.num_experts,
                   data.topk, flags->ranks);
      }
      write_json(flags->json, {{"schema", 1}, {"output", flags->output},
                               {"tokens", data.num_tokens}, {"hidden", data.hidden},
                               {"ffn", data.ffn}, {"experts", data.num_experts},
                               {"topk", data.topk}, {"ranks", flags->ranks}});
      return 0;
    };
  });
}

void add_run(CLI::App& app, Run& run) {
  auto flags = std::make_shared<RunFlags>();
  auto* command = app.add_subcommand("run", "run the layer on the tensors of a file");
  command->add_option("case", flags->input, "tensor file (safetensors)")->required();
  command->add_option("-o,--output", flags->output, "tensor file to write")->required();
  command->add_flag("--backward", flags->backward, "also the gradients; the case needs d_out");
  command->add_option("--backend", flags->backend, "cpu or cuda")->capture_default_str();
  command->add_option("--ranks", flags->ranks, "ranks, instead of the file's")
      ->check(CLI::Range(1, kMaxRanks));
  command->add_option("--schedule", flags->schedule, "key=value,…");
  command->add_option("--numerics", flags->numerics, "numeric class")->capture_default_str();
  command->add_option("--json", flags->json, "write the hashes as JSON to FILE, - for stdout");
  command->callback([&run, flags] { run = [flags] { return run_layer(*flags); }; });
}

void add_trace(CLI::App& app, Run& run) {
  struct Flags {
    CaseOptions options;
    std::string output, schedule;
    int ranks = 4;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("trace", "write who did what when, for Perfetto");
  add_case_options(*command, flags->options);
  command->add_option("-o,--output", flags->output, "JSON file to write")->required();
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")->capture_default_str();
  command->add_option("--ranks", flags->ranks, "ranks")->capture_default_str();
  command->add_option("--schedule", flags->schedule, "key=value,…");
  command->callback([&run, flags] {
    run = [flags] {
      RunOptions options;
      options.num_ranks = flags->ranks;
      options.schedule = parse_schedule(flags->schedule);
      options.backward = true;
      options.trace = true;
      if (flags->ranks < 1 || flags->ranks > kMaxRanks) {
        throw_invalid("--ranks is {}; it must be 1 to {}", flags->ranks, kMaxRanks);
      }
      const auto result = run_case(build_case(flags->options, flags->ranks, true), options);
      write_json(flags->output, trace_events(result.trace));
      fmt::print("{}: {} events of {} ranks\n", flags->output, result.trace.size(), flags->ranks);
      return 0;
    };
  });
}

}  // namespace uniep::tools
