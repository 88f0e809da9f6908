// SPDX-License-Identifier: Apache-2.0
// uniep info, case and run.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "base/memory.hpp"
#include "commands.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"
#include "tune.hpp"

namespace uniep::tools {
namespace {

TensorFile to_file(const Case& c, CaseResult result, bool backward) {
  const std::vector<std::int64_t> tokens{c.num_tokens, c.hidden};
  TensorFile file;
  file.metadata = {{"uniep_format", "1"}, {"numerics", "default"}};
  file.tensors["out"] = {c.dtype, tokens, std::move(result.out)};
  if (!backward) return file;
  file.tensors["d_x"] = {c.dtype, tokens, std::move(result.d_x)};
  file.tensors["d_topk_weights"] =
      make_tensor(DType::f32, {c.num_tokens, c.topk}, result.d_topk_weights);
  file.tensors["d_w1"] = make_tensor(DType::f32, {c.num_experts, 2 * c.ffn, c.hidden}, result.d_w1);
  file.tensors["d_w2"] = make_tensor(DType::f32, {c.num_experts, c.hidden, c.ffn}, result.d_w2);
  return file;
}

struct RunFlags {
  LayerOptions layer;
  std::string input, output, json;
  std::int64_t ranks = 0;  // 0: the file's
  bool backward = false;
};

int ranks_of(const RunFlags& f, const Case& data) {
  const auto file_ranks = std::max<std::size_t>(1, data.tokens_per_rank.size());
  return static_cast<int>(f.ranks > 0 ? f.ranks : static_cast<std::int64_t>(file_ranks));
}

// Writes the results and their hashes; `json` already has how they were made.
int write_results(const RunFlags& f, const Case& data, CaseResult result, OutputFile& output,
                  Report& report, nlohmann::json json) {
  const auto hashes = hash_results(result);
  json["schema"] = 1;
  json["output"] = f.output;
  for (std::size_t i = 0; i < (f.backward ? hashes.size() : 1); ++i) {
    json["hashes"][kResultNames[i]] = fmt::format("{:016x}", hashes[i]);
  }
  report.write(json);
  write_tensor_file(output, f.output, to_file(data, std::move(result), f.backward));
  output.publish();
  for (std::size_t i = 0; i < (f.backward ? hashes.size() : 1); ++i) {
    report.print("{:<15} {:016x}\n", kResultNames[i], hashes[i]);
  }
  report.publish();
  return 0;
}

// The launcher's job, where this process is one of its ranks; checks that --ranks agrees.
std::optional<Job> job_of(const RunFlags& f) {
  if (!f.layer.processes) return std::nullopt;
  const auto job = job_from_environment();
  if (job && f.ranks > 0 && f.ranks != job->num_ranks) {
    throw_invalid("--ranks is {}; the launcher started {} ranks", f.ranks, job->num_ranks);
  }
  return job;
}

int run_layer_on_gpu(RunFlags f) {
  check_distinct(f.output, f.json);
  const Case data = load_case(f.input);
  const std::optional<Job> job = job_of(f);
  const int num_ranks = job ? job->num_ranks : ranks_of(f, data);
  const std::string from = resolve_auto(f.layer, data, num_ranks);
  CudaOptions options = cuda_options(f.layer);
  options.backward = f.backward;
  options.num_ranks = num_ranks;
  options.job = job;
  if (options.job) options.processes = false;
  options.schedule = resolve(options.schedule, ranks_of_launch(options));
  if (options.job && options.job->rank > 0) {
    static_cast<void>(run_case_on_gpu(data, options));
    return 0;
  }
  const auto output = open_tensor_output(f.output);
  Report report(f.json);
  CaseResult result = run_case_on_gpu(data, options);
  return write_results(f, data, std::move(result), *output, report,
                       {{"backend", "cuda"},
                        {"gpu", cuda_facts().gpu},
                        {"ranks", options.num_ranks},
                        {"schedule", to_string(options.schedule)},
                        {"schedule_from", from},
                        {"memory_bytes", {{"symmetric", symmetric_bytes(data, options)}}}});
}

int run_layer(RunFlags f) {
  check_layer_options(f.layer);
  if (f.layer.is_cuda()) return run_layer_on_gpu(std::move(f));
  check_distinct(f.output, f.json);
  const Case data = load_case(f.input);
  const std::optional<Job> job = job_of(f);
  const int num_ranks = job ? job->num_ranks : ranks_of(f, data);
  const std::string from = resolve_auto(f.layer, data, num_ranks);
  RunOptions options = run_options(f.layer);
  options.backward = f.backward;
  options.num_ranks = num_ranks;
  options.job = job;
  if (options.job) {
    options.processes = false;
    if (options.job->rank > 0) {
      static_cast<void>(run_case(data, options));
      return 0;
    }
  }
  const auto output = open_tensor_output(f.output);
  Report report(f.json);
  CaseResult result = run_case(data, options);
  const RunMemory memory = memory_of_run(data, options);
  return write_results(
      f, data, std::move(result), *output, report,
      {{"backend", "cpu"},
       {"ranks", options.num_ranks},
       {"schedule", to_string(options.schedule)},
       {"schedule_from", from},
       {"memory_bytes", {{"tensors", memory.tensors}, {"buffers", memory.buffers}}}});
}

int run_info(const std::string& json_path) {
  Report report(json_path);
  nlohmann::json info = machine_info();
  info["schema"] = 1;
  const CudaFacts gpu = cuda_facts();
  const bool has_cuda = gpu.missing.empty();
  info["backends"] = {{"cpu", "ok"}, {"cuda", has_cuda ? "ok" : "no: " + gpu.missing}};
  info["providers"] = {{"host", "ok: ranks as threads or processes of this machine"},
                       {"cuda", has_cuda ? "ok: up to 16 ranks, virtual on one GPU or as processes"
                                         : "no: backend cuda is not"}};
  if (!gpu.gpu.empty()) info["gpu"] = gpu_info(gpu);
  const auto text = [&info](const char* key) { return info[key].get<std::string>(); };
  const auto bytes = [&info](const char* key) { return bytes_text(info[key].get<double>()); };
  report.print("{:<14} {}, commit {}, {} build, compiler {}\n", "uniep", text("version"),
               text("commit"), text("build"), text("compiler"));
  report.print("{:<14} {}, {}\n", "system", text("system"), text("architecture"));
  report.print("{:<14} {}, {} cores, products with {}\n", "cpu", text("cpu"),
               info["cores"].get<int>(), text("gemm_instruction_set"));
  report.print("{:<14} {}, {} available\n", "memory", bytes("memory_bytes"),
               bytes("available_bytes"));
  if (!gpu.gpu.empty()) {
    report.print("{:<14} {}, capability {}, {} SMs, {}, driver {}, CUDA {}\n", "gpu", gpu.gpu,
                 gpu.capability, gpu.sms, bytes_text(static_cast<double>(gpu.memory_bytes)),
                 gpu.driver, gpu.runtime);
  }
  for (const char* kind : {"backend", "provider"}) {
    for (const auto& [name, state] : info[std::string(kind) + "s"].items()) {
      report.print("{:<14} {}\n", fmt::format("{} {}", kind, name), state.get<std::string>());
    }
  }
  report.write(info);
  report.publish();
  return 0;
}

struct CaseFlags {
  CaseOptions options;
  std::string output, json;
  std::int64_t ranks = 1;
};

int make_case_file(const CaseFlags& f) {
  check_distinct(f.output, f.json);
  const auto output = open_tensor_output(f.output);
  Report report(f.json);
  Case data = build_case(f.options, static_cast<int>(f.ranks), true);
  report.write({{"schema", 1},
                {"output", f.output},
                {"tokens", data.num_tokens},
                {"hidden", data.hidden},
                {"ffn", data.ffn},
                {"experts", data.num_experts},
                {"topk", data.topk},
                {"ranks", f.ranks},
                {"dtype", f.options.dtype},
                {"routing", f.options.routing},
                {"seed", f.options.seed}});
  const std::string summary =
      fmt::format("{} tokens, hidden {}, ffn {}, {} experts, topk {}, {} ranks", data.num_tokens,
                  data.hidden, data.ffn, data.num_experts, data.topk, f.ranks);
  write_tensor_file(*output, f.output, to_tensor_file(std::move(data)));
  output->publish();
  report.print("{}: {}\n", f.output, summary);
  report.publish();
  return 0;
}

}  // namespace

void add_info(CLI::App& app, Run& run) {
  auto json = std::make_shared<std::string>();
  auto* command = app.add_subcommand("info", "the machine, the build, and what can run here");
  add_json_option(*command, *json, "the facts");
  command->callback([&run, json] { run = [json] { return run_info(*json); }; });
}

void add_case(CLI::App& app, Run& run) {
  auto flags = std::make_shared<CaseFlags>();
  auto* command = app.add_subcommand("case", "write a random case of a shape and a routing");
  add_case_options(*command, flags->options);
  command->add_option("-o,--output", flags->output, "tensor file (safetensors) to write")
      ->type_name("FILE")
      ->required();
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks that tokens are split over");
  add_json_option(*command, flags->json, "a summary");
  command->callback([&run, flags] { run = [flags] { return make_case_file(*flags); }; });
}

void add_run(CLI::App& app, Run& run) {
  auto flags = std::make_shared<RunFlags>();
  flags->layer.takes_auto = true;
  auto* command = app.add_subcommand("run", "run the layer on the tensors of a file");
  command->add_option("CASE", flags->input, "tensor file (safetensors) to read")->required();
  command->add_option("-o,--output", flags->output, "tensor file (safetensors) to write")
      ->type_name("FILE")
      ->required();
  command->add_flag("--backward", flags->backward, "also the gradients; the case needs d_out");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks; the bits do not change",
             "the file's");
  add_layer_options(*command, flags->layer);
  add_json_option(*command, flags->json, "the hashes");
  command->callback([&run, flags] { run = [flags] { return run_layer(*flags); }; });
}

}  // namespace uniep::tools
