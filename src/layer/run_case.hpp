// SPDX-License-Identifier: Apache-2.0
// Runs the layer on a case of global tensors: splits it over ranks, gives each rank a thread, and
// puts the results together again. The sequential path has the same results by another way.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/group.hpp"
#include "io/case.hpp"

namespace uniep {

struct CaseResult {
  std::vector<std::byte> out;         // [num_tokens, hidden] in the case's dtype
  std::vector<std::byte> d_x;         // [num_tokens, hidden] in the case's dtype
  std::vector<float> d_topk_weights;  // [num_tokens, topk]
  std::vector<float> d_w1;            // [num_experts, 2 * ffn, hidden]
  std::vector<float> d_w2;            // [num_experts, hidden, ffn]
  std::vector<cpu::TraceEvent> trace; // forward, then backward, of all ranks; where asked
};

struct RunOptions {
  int num_ranks = 1;
  Schedule schedule;
  bool backward = false;              // needs the case's d_out
  int repeats = 1;                    // operations on the same group; the last one's results
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  std::function<void(const cpu::TaskInfo&)> before_task;
  bool trace = false;
};

// Tokens of each rank: the case's own split where it is for num_ranks ranks, an even one otherwise.
[[nodiscard]] std::vector<std::int64_t> tokens_of_ranks(const Case& data, int num_ranks);

// Errors: invalid_argument where the case lacks d_out for a backward; world as in cpu::RankLayer.
[[nodiscard]] CaseResult run_case(const Case& data, const RunOptions& options);
[[nodiscard]] CaseResult run_case_sequential(const Case& data, bool backward);

// The same in f64 from the case's values, for error bounds: out, d_x, d_topk_weights, d_w1, d_w2.
struct ReferenceResult {
  std::vector<double> out, d_x, d_topk_weights, d_w1, d_w2;
};
[[nodiscard]] ReferenceResult run_case_f64(const Case& data, bool backward);

}  // namespace uniep
