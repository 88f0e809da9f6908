// SPDX-License-Identifier: Apache-2.0
// What the commands share: options with their checks, reports, facts about the machine.
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "base/memory.hpp"
#include "commands.hpp"
#include "cpu/gemm.hpp"
#include "uniep/version.hpp"
#include "uniep_commit.hpp"

namespace uniep::tools {
namespace {

template <typename T>
void add_checked(CLI::App& app, const std::string& flag, T& value, T low, T high,
                 const std::string& help, const std::string& default_text, const char* kind) {
  app.add_option_function<std::string>(
         flag,
         [flag, &value, low, high, kind](const std::string& text) {
           T parsed{};
           const char* end = text.data() + text.size();
           const auto [stop, error] = std::from_chars(text.data(), end, parsed);
           if (error != std::errc{} || stop != end || !(parsed >= low && parsed <= high)) {
             throw_invalid("{} is {}; it must be {} from {} to {}", flag, quote(text), kind, low,
                           high);
           }
           value = parsed;
         },
         fmt::format("{}, {} to {}", help, low, high))
      ->type_name("N")
      ->default_str(default_text.empty() ? fmt::format("{}", value) : default_text);
}

}  // namespace

void add_number(CLI::App& app, const std::string& flag, std::int64_t& value, std::int64_t low,
                std::int64_t high, const std::string& help, const std::string& default_text) {
  add_checked(app, flag, value, low, high, help, default_text, "a whole number");
}

void add_real(CLI::App& app, const std::string& flag, double& value, double low, double high,
              const std::string& help) {
  add_checked(app, flag, value, low, high, help, "", "a number");
}

void add_case_options(CLI::App& app, CaseOptions& o) {
  std::string shapes;
  for (const Shape& shape : named_shapes()) shapes += (shapes.empty() ? "" : ", ") + shape.name;
  app.add_option("--shape", o.shape, "named sizes: " + shapes)
      ->type_name("NAME")
      ->capture_default_str();
  const std::string own = "the shape's";
  add_number(app, "--global-tokens", o.tokens, 0, kMaxTokensFlag, "tokens over all ranks", own);
  add_number(app, "--hidden", o.hidden, 8, std::int64_t{1} << 30,
             "model width H in elements, a multiple of 8", own);
  add_number(app, "--ffn", o.ffn, 8, std::int64_t{1} << 30,
             "inner width F of an expert in elements, a multiple of 8", own);
  add_number(app, "--experts", o.experts, 1, 1 << 20, "experts E over all ranks", own);
  add_number(app, "--topk", o.topk, 1, kMaxTopk, "choices of a token", own);
  app.add_option("--routing", o.routing,
                 "which experts tokens choose: W0 to W7, uniform, zipf:S, one-hot, empty-ranks, "
                 "file:PATH")
      ->type_name("NAME")
      ->capture_default_str();
  add_real(app, "--mask", o.mask, 0, 1, "probability that a choice is masked");
  add_checked<std::uint64_t>(app, "--seed", o.seed, 0, std::numeric_limits<std::uint64_t>::max(),
                             "seed of every random value", "", "a whole number");
}

Shape resolve_shape(const CaseOptions& o) {
  Shape shape = find_shape(o.shape);
  const auto set = [](std::int64_t value, std::int64_t& to) {
    if (value != -1) to = value;
  };
  set(o.tokens, shape.tokens);
  set(o.hidden, shape.hidden);
  set(o.ffn, shape.ffn);
  set(o.experts, shape.experts);
  set(o.topk, shape.topk);
  if (shape.tokens == 0 && o.tokens == -1) {
    throw_invalid("shape {} has no token count of its own; give one with --global-tokens",
                  shape.name);
  }
  return shape;
}

DType parse_dtype(const std::string& text) {
  if (text == "bf16") return DType::bf16;
  if (text == "f32") return DType::f32;
  throw_invalid("--dtype is {}; it can be bf16 or f32", quote(text));
}

Case build_case(const CaseOptions& o, int num_ranks, bool with_d_out) {
  return make_case(resolve_shape(o), parse_dtype(o.dtype), parse_routing(o.routing), num_ranks,
                   o.mask, o.seed, with_d_out);
}

std::int64_t count_rows(const Case& data) {
  return std::count_if(data.topk_ids.begin(), data.topk_ids.end(),
                       [](std::int32_t id) { return id >= 0; });
}

void add_layer_options(CLI::App& app, LayerOptions& o) {
  app.add_option("--backend", o.backend, "cpu or cuda")->type_name("NAME")->capture_default_str();
  app.add_option(
         "--schedule", o.schedule,
         "how the work is done, never what comes out. On the cpu any of fusion=fused|split, "
         "payload=rank|choice, direction=push|pull, tile_m=64 (rows), tile_n=128 (columns), "
         "expert_order=ascending|rotated, destination_order=rotated|ascending, "
         "wgrad=filling|after, workers=1 (threads of a rank), comm_workers=0 (of them, how "
         "many move rows first), chunk=16 (tokens). On cuda any of fusion=split|fused "
         "(fused: bf16 on a GPU, up to 8 ranks, push), payload=rank|choice, dispatch=push|pull, "
         "combine=push|pull, blocks=0 (of a rank for "
         "moving rows; 0: up to 16), push_warps=8 (of a block's 16), chunk=8 (tokens), sms=0 (for "
         "products; 0: all). The first or shown value is the default. run and bench also take "
         "auto: "
         "what uniep tune found, or else the default")
      ->type_name("K=V,…");
  app.add_option("--numerics", o.numerics, "numeric class: default")
      ->type_name("NAME")
      ->capture_default_str();
  add_number(app, "--timeout", o.timeout, 1, 86400,
             "seconds without progress of any rank after which a run is given up");
  app.add_flag(
      "--processes", o.processes,
      "each rank in a process of its own, not in a thread; on cuda rank r has GPU r modulo "
      "their number, instead of all ranks sharing one launch; for `run` under torchrun or "
      "mpirun, this process is one of the ranks");
}

void check_layer_options(const LayerOptions& o) {
  if (o.backend != "cpu" && o.backend != "cuda") {
    throw_invalid("--backend is {}; it can be cpu or cuda", quote(o.backend));
  }
  if (o.numerics != "default") {
    throw_invalid("--numerics is {}; the only numeric class served is default", quote(o.numerics));
  }
  const bool is_auto = o.takes_auto && o.schedule == "auto";
  if (!o.is_cuda()) {
    if (!is_auto) static_cast<void>(parse_schedule(o.schedule));
    return;
  }
  if (!is_auto) static_cast<void>(parse_cuda_schedule(o.schedule));
  if (o.processes) ask_facts_in_child();  // ranks will be forked
  require_cuda();
}

RunOptions run_options(const LayerOptions& o) {
  RunOptions options;
  options.schedule = parse_schedule(o.schedule);
  options.wait_bound = std::chrono::seconds(o.timeout);
  options.processes = o.processes;
  return options;
}

CudaOptions cuda_options(const LayerOptions& o) {
  CudaOptions options;
  options.schedule = parse_cuda_schedule(o.schedule);
  options.wait_bound = std::chrono::seconds(o.timeout);
  options.processes = o.processes;
  return options;
}

RunOptions cpu_run_options(const LayerOptions& o, const char* what) {
  check_layer_options(o);
  if (o.is_cuda()) throw_world("uniep {} runs on the cpu backend only", what);
  return run_options(o);
}

std::vector<int> parse_ranks(const std::string& text) {
  std::vector<int> ranks;
  std::string_view rest = text;
  while (true) {
    const std::size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    int value = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), value);
    if (error != std::errc{} || end != item.data() + item.size() || value < 1 ||
        value > kMaxRanks) {
      throw_invalid("--ranks has {}; each must be a whole number from 1 to {}", quote(item),
                    kMaxRanks);
    }
    ranks.push_back(value);
    if (comma == std::string_view::npos) return ranks;
    rest = rest.substr(comma + 1);
  }
}

void add_json_option(CLI::App& app, std::string& path, const std::string& what) {
  app.add_option("--json", path, what + " as JSON to FILE; - is standard output, without the table")
      ->type_name("FILE");
}

Report::Report(const std::string& json_path) : has_table_(json_path != "-") {
  if (has_table_ && !json_path.empty())
    file_ = std::make_unique<OutputFile>("JSON file", json_path);
}

void Report::write(const nlohmann::json& value) {
  // A path may hold bytes that are not UTF-8, which JSON cannot carry.
  const std::string text =
      value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  if (!has_table_) text_ = text;
  if (!file_) return;
  file_->write(std::as_bytes(std::span(text)));
  file_->sync();
}

void Report::publish() {
  if (file_) file_->publish();
  fmt::print("{}", text_);
}

std::unique_ptr<OutputFile> open_tensor_output(const std::string& path) {
  if (path == "-") {
    throw_invalid("-o is '-', but a tensor file cannot go to standard output; give it a name");
  }
  return std::make_unique<OutputFile>("tensor file", path);
}

void check_distinct(const std::string& output, const std::string& json,
                    const std::string& output_flag, const std::string& json_flag) {
  std::error_code ignored;
  const auto real = [&ignored](const std::string& path) {
    return std::filesystem::weakly_canonical(path, ignored);
  };
  if (json.empty() || json == "-" || output == "/dev/null" || real(output) != real(json)) return;
  throw_invalid("{} and {} both name {}; give them different files", output_flag, json_flag,
                quote(json));
}

nlohmann::json machine_info() {
  utsname system{};
  ::uname(&system);
  std::string cpu = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos) {
      cpu = line.substr(line.find(": ") + 2);
      break;
    }
  }
  const std::int64_t pages = ::sysconf(_SC_PHYS_PAGES);
  return {{"system", fmt::format("{} {}", system.sysname, system.release)},
          {"architecture", system.machine},
          {"cpu", cpu},
          {"cores", std::thread::hardware_concurrency()},
          {"memory_bytes", pages * ::sysconf(_SC_PAGESIZE)},
          {"available_bytes", available_bytes()},
          {"gemm_instruction_set", cpu::to_string(cpu::best_instruction_set())},
          {"compiler", __VERSION__},
          {"build", UNIEP_BUILD_TYPE},
          {"commit", UNIEP_COMMIT},
          {"version", UNIEP_VERSION}};
}

nlohmann::json gpu_info(const CudaFacts& facts) {
  return {{"name", facts.gpu},
          {"capability", facts.capability},
          {"sms", facts.sms},
          {"memory_bytes", facts.memory_bytes},
          {"driver", facts.driver},
          {"cuda", facts.runtime},
          {"emulated", facts.is_emulated}};
}

}  // namespace uniep::tools
