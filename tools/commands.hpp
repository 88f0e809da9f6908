// SPDX-License-Identifier: Apache-2.0
// The subcommands of the uniep program. Each registers its options on `app` and sets `run`, which
// returns the exit code; Error and CLI11's own errors are turned into exit codes by main.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/case.hpp"
#include "uniep/schedule.hpp"

namespace uniep::tools {

using Run = std::function<int()>;

void add_info(CLI::App& app, Run& run);
void add_case(CLI::App& app, Run& run);
void add_run(CLI::App& app, Run& run);
void add_verify(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_trace(CLI::App& app, Run& run);

// Shape, routing and seed options that several commands share.
struct CaseOptions {
  std::string shape = "tiny";
  std::string routing = "uniform";
  std::string dtype = "bf16";
  std::int64_t tokens = -1;   // global; -1 = the shape's own
  std::int64_t hidden = -1, ffn = -1, experts = -1, topk = -1;
  double mask = 0;
  std::uint64_t seed = 1;
};
void add_case_options(CLI::App& app, CaseOptions& options);
[[nodiscard]] Shape resolve_shape(const CaseOptions& options);
[[nodiscard]] DType parse_dtype(const std::string& text);
[[nodiscard]] Case build_case(const CaseOptions& options, int num_ranks, bool with_d_out);

void check_backend(const std::string& backend);
void check_numerics(const std::string& numerics);
[[nodiscard]] std::vector<int> parse_ranks(const std::string& text);
// Writes to `path` through a temporary file; "-" is standard output; "" does nothing.
void write_json(const std::string& path, const nlohmann::json& value);
[[nodiscard]] nlohmann::json machine_info();

}  // namespace uniep::tools
