// SPDX-License-Identifier: Apache-2.0
// The subcommands of the uniep program. Each registers its options on `app` and sets `run`, which
// returns the exit code; Error and CLI11's own errors are turned into exit codes by main.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cuda/backend.hpp"
#include "io/case.hpp"
#include "io/output_file.hpp"
#include "uniep/schedule.hpp"

namespace uniep::tools {

using Run = std::function<int()>;

void add_info(CLI::App& app, Run& run);
void add_case(CLI::App& app, Run& run);
void add_run(CLI::App& app, Run& run);
void add_verify(CLI::App& app, Run& run);
void add_bench(CLI::App& app, Run& run);
void add_trace(CLI::App& app, Run& run);
void add_train(CLI::App& app, Run& run);
void add_simulate(CLI::App& app, Run& run);
void add_tune(CLI::App& app, Run& run);

// A number with its range and, unless `default_text` replaces it, its default in the help text.
// Anything else than a decimal number inside the range is refused.
void add_number(CLI::App& app, const std::string& flag, std::int64_t& value, std::int64_t low,
                std::int64_t high, const std::string& help, const std::string& default_text = "");
void add_real(CLI::App& app, const std::string& flag, double& value, double low, double high,
              const std::string& help);

// Shape, routing and seed options that several commands share.
struct CaseOptions {
  std::string shape = "tiny";
  std::string routing = "uniform";
  std::string dtype = "bf16";
  std::int64_t tokens = -1;  // global; -1 = the shape's own, here and below
  std::int64_t hidden = -1, ffn = -1, experts = -1, topk = -1;
  double mask = 0;
  std::uint64_t seed = 1;
};
inline constexpr std::int64_t kMaxTokensFlag = std::int64_t{1} << 30;
void add_case_options(CLI::App& app, CaseOptions& options);
[[nodiscard]] Shape resolve_shape(const CaseOptions& options);
[[nodiscard]] DType parse_dtype(const std::string& text);
[[nodiscard]] Case build_case(const CaseOptions& options, int num_ranks, bool with_d_out);
// Choices that are not masked.
[[nodiscard]] std::int64_t count_rows(const Case& data);

// Options of every command that runs the layer.
struct LayerOptions {
  std::string backend = "cpu", numerics = "default", schedule;
  std::int64_t timeout = 30;  // seconds
  bool processes = false;
  bool takes_auto = false;  // of run and bench: --schedule may be auto

  [[nodiscard]] bool is_cuda() const { return backend == "cuda"; }
};
void add_layer_options(CLI::App& app, LayerOptions& options);
// Refuses a backend or a numeric class that is not served, a schedule that the backend cannot read,
// and the cuda backend where it cannot run.
void check_layer_options(const LayerOptions& options);
// What all runs take from checked options of their backend.
[[nodiscard]] RunOptions run_options(const LayerOptions& options);
[[nodiscard]] CudaOptions cuda_options(const LayerOptions& options);
// Checks the options of a command that `what` names and that runs on the CPU alone.
[[nodiscard]] RunOptions cpu_run_options(const LayerOptions& options, const char* what);

[[nodiscard]] std::vector<int> parse_ranks(const std::string& text);
[[nodiscard]] nlohmann::json machine_info();
[[nodiscard]] nlohmann::json gpu_info(const CudaFacts& facts);

void add_json_option(CLI::App& app, std::string& path, const std::string& what);

// A command's results: a table on standard output, and JSON in a file or, instead of the table, on
// standard output. The file is opened at once, so that a bad path is refused before any work.
class Report {
 public:
  explicit Report(const std::string& json_path);

  template <typename... Args>
  void print(fmt::format_string<Args...> format, Args&&... args) {
    if (has_table_) fmt::print(format, std::forward<Args>(args)...);
  }
  // Writes the JSON, which then needs only its name; publish gives it.
  void write(const nlohmann::json& value);
  void publish();

 private:
  bool has_table_;
  std::string text_;  // of JSON for standard output
  std::unique_ptr<OutputFile> file_;
};

// Opens a tensor file for output; "-" is refused.
[[nodiscard]] std::unique_ptr<OutputFile> open_tensor_output(const std::string& path);
// Refuses one name for two files. The flags are those the names were given with.
void check_distinct(const std::string& output, const std::string& json,
                    const std::string& output_flag = "-o", const std::string& json_flag = "--json");

}  // namespace uniep::tools
