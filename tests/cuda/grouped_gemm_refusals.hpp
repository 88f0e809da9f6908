// SPDX-License-Identifier: Apache-2.0
// Calls of the grouped GEMM that must be refused. Apart from the kernels' test, since libfmt 9 and
// nvcc do not agree.
#pragma once

#include <string>
#include <vector>

namespace uniep::cuda_test {

struct Refusal {
  std::string what;
  bool refused = false;  // as invalid_argument
  std::string text{};
};

// `memory` is 128 KiB of device memory.
[[nodiscard]] std::vector<Refusal> try_refusals(void* memory);

}  // namespace uniep::cuda_test
