// SPDX-License-Identifier: Apache-2.0
// The other ways to run a case, for comparison: the sequential path, and f64. The threaded path,
// run_case, is in uniep/case.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "uniep/case.hpp"

namespace uniep {

// Tokens of each rank: the case's own split where it is for num_ranks ranks, an even one otherwise.
[[nodiscard]] std::vector<std::int64_t> tokens_of_ranks(const Case& data, int num_ranks);

[[nodiscard]] CaseResult run_case_sequential(const Case& data, bool backward);

// The same in f64 from the case's values, for error bounds: out, d_x, d_topk_weights, d_w1, d_w2.
struct ReferenceResult {
  std::vector<double> out, d_x, d_topk_weights, d_w1, d_w2;
};
[[nodiscard]] ReferenceResult run_case_f64(const Case& data, bool backward);

// What run_case needs, in bytes: the case and its results, and what is declared beside them, the
// symmetric heap and what the ranks keep of their rows. Errors: as run_case for its options.
struct RunMemory {
  double tensors = 0;
  double buffers = 0;
};
[[nodiscard]] RunMemory memory_of_run(const Case& data, const RunOptions& options);

}  // namespace uniep
