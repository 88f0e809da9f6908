// SPDX-License-Identifier: Apache-2.0
// What verifying on the CPU and on a GPU share: flags, counting, the table.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/rng.hpp"
#include "commands.hpp"
#include "uniep/case.hpp"

namespace uniep::tools {

struct VerifyFlags {
  CaseOptions options;
  LayerOptions layer;
  std::string ranks = "1,2,4", json, dtype = "both";
  std::int64_t schedules = 8;
  std::int64_t sample = -1;  // tokens that the CPU recomputes; 0: all; -1: as many as it can
  bool fuzz = false;
  double seconds = 10;
};

struct Verdict {
  Report report;
  int runs = 0;
  int failures = 0;
  nlohmann::json records = nlohmann::json::array();
};

void fail(Verdict& verdict, const std::string& text);
void print_header(Report& report, const std::string& dtype);
void print_row(Report& report, const std::string& name, const std::array<std::uint64_t, 5>& hashes,
               std::int64_t equal, std::int64_t runs);
void add_ranks_record(Verdict& verdict, const std::string& dtype, int num_ranks,
                      std::int64_t schedules, std::int64_t equal,
                      const std::array<std::uint64_t, 5>& hashes);
// On a terminal, in place of what was shown before.
void show_progress(const std::string& text);
// The errors of `got`, with their bounds, as a row; each that is beyond its bound is a failure.
void verify_f64(const Case& data, const CaseResult& got, Verdict& verdict);

template <typename T, std::size_t N>
T pick(Rng& rng, const std::array<T, N>& values) {
  return values[static_cast<std::size_t>(rng.below(N))];
}

// One rank of the GPU against f64, all tokens or a sample, and, where the arithmetic is the same,
// against the CPU's bits; then every rank count and schedule against that one rank, bit for bit.
void verify_dtype_on_gpu(const VerifyFlags& flags, const std::string& dtype, Verdict& verdict);
// The same for one random case from a seed; returns what failed, or nothing.
[[nodiscard]] std::string fuzz_one_on_gpu(std::uint64_t seed, const LayerOptions& layer,
                                          std::string& description);

}  // namespace uniep::tools
