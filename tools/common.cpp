// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "commands.hpp"
#include "uniep/version.hpp"
#include "cpu/gemm.hpp"

namespace uniep::tools {

void add_case_options(CLI::App& app, CaseOptions& o) {
  app.add_option("--shape", o.shape, "named shape, e.g. tiny, qwen3-30b-a3b")->capture_default_str();
  app.add_option("--global-tokens", o.tokens, "tokens over all ranks");
  app.add_option("--hidden", o.hidden, "model width H, instead of the shape's");
  app.add_option("--ffn", o.ffn, "expert inner width F, instead of the shape's");
  app.add_option("--experts", o.experts, "experts E, instead of the shape's");
  app.add_option("--topk", o.topk, "choices per token, instead of the shape's");
  app.add_option("--routing", o.routing,
                 "W0 to W7, uniform, zipf:S, one-hot, empty-ranks, file:PATH")
      ->capture_default_str();
  app.add_option("--mask", o.mask, "probability that a choice is masked, 0 to 1")
      ->capture_default_str();
  app.add_option("--seed", o.seed, "seed of every random value")->capture_default_str();
}

Shape resolve_shape(const CaseOptions& o) {
  Shape shape = find_shape(o.shape);
  const auto set = [](const char* flag, std::int64_t value, std::int64_t low, std::int64_t high,
                      std::int64_t& to) {
    if (value == -1) return;
    if (value < low || value > high) {
      throw_invalid("{} is {}; it must be {} to {}", flag, value, low, high);
    }
    to = value;
  };
  constexpr std::int64_t kMax = std::int64_t{1} << 30;
  set("--global-tokens", o.tokens, 0, kMax, shape.tokens);
  set("--hidden", o.hidden, 8, kMax, shape.hidden);
  set("--ffn", o.ffn, 8, kMax, shape.ffn);
  set("--experts", o.experts, 1, 1 << 20, shape.experts);
  set("--topk", o.topk, 1, kMaxTopk, shape.topk);
  if (shape.tokens == 0 && o.tokens == -1) {
    throw_invalid("shape {} needs --global-tokens", shape.name);
  }
  return shape;
}

DType parse_dtype(const std::string& text) {
  if (text == "bf16") return DType::bf16;
  if (text == "f32") return DType::f32;
  throw_invalid("--dtype is '{}'; it can be bf16 or f32", text);
}

Case build_case(const CaseOptions& o, int num_ranks, bool with_d_out) {
  return make_case(resolve_shape(o), parse_dtype(o.dtype), parse_routing(o.routing), num_ranks,
                   o.mask, o.seed, with_d_out);
}

void check_backend(const std::string& backend) {
  if (backend == "cpu") return;
  if (backend == "cuda") {
    throw_world("--backend cuda cannot run here: this build serves the layer on cpu only");
  }
  throw_invalid("--backend is '{}'; it can be cpu or cuda", backend);
}

void check_numerics(const std::string& numerics) {
  if (numerics != "default") {
    throw_invalid("--numerics is '{}'; the only numeric class served is default", numerics);
  }
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
      throw_invalid("--ranks has '{}'; each must be a whole number from 1 to {}", item, kMaxRanks);
    }
    ranks.push_back(value);
    if (comma == std::string_view::npos) return ranks;
    rest = rest.substr(comma + 1);
  }
}

void write_json(const std::string& path, const nlohmann::json& value) {
  if (path.empty()) return;
  const std::string text = value.dump(2) + "\n";
  if (path == "-") {
    fmt::print("{}", text);
    return;
  }
  const std::string temporary = fmt::format("{}.tmp-{}", path, ::getpid());
  {
    std::ofstream file(temporary);
    file << text;
    file.flush();
    if (!file) {
      std::remove(temporary.c_str());
      throw_invalid("--json file '{}' cannot be written; its folder must exist and be writable",
                    path);
    }
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) {
    std::remove(temporary.c_str());
    throw_invalid("--json file '{}' cannot be written: {}", path, error.message());
  }
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
          {"gemm_instruction_set", cpu::gemm_instruction_set()},
          {"compiler", __VERSION__},
          {"build", UNIEP_BUILD_TYPE},
          {"version", UNIEP_VERSION}};
}

}  // namespace uniep::tools
