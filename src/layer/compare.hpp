// SPDX-License-Identifier: Apache-2.0
// Comparing results: bit for bit with another path, and against f64 within a derived bound.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "layer/run_case.hpp"

namespace uniep {

inline constexpr std::array<const char*, 5> kResultNames{"out", "d_x", "d_topk_weights", "d_w1",
                                                         "d_w2"};

// FNV-1a of each result, in the order of kResultNames.
[[nodiscard]] std::array<std::uint64_t, 5> hash_results(const CaseResult& result);

// Empty where all results have the same bits; otherwise how many elements differ, the first one's
// coordinates and both values.
[[nodiscard]] std::string describe_difference(const Case& data, const CaseResult& expected,
                                              const CaseResult& got);

struct ErrorBound {
  double relative = 0;  // ||got - reference|| / ||reference||, infinity where not finite
  double bound = 0;     // of docs/design/numerics.md
};
[[nodiscard]] std::array<ErrorBound, 5> compare_with_f64(const Case& data, const CaseResult& got,
                                                         const ReferenceResult& reference);

}  // namespace uniep
