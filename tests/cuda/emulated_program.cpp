// SPDX-License-Identifier: Apache-2.0
// Linked into uniep_emulated, the uniep program with a GPU emulated on the CPU. It is for tests and
// is never installed; it says so whenever it runs.
#include <cstdio>

#include "cuda_runtime.h"

namespace {

[[maybe_unused]] const bool is_told = [] {
  uniep::emulation::num_sms = 8;  // few, since each block is a thread of the operating system
  std::fputs(
      "uniep_emulated: for tests; --backend cuda runs the GPU's kernels emulated on this CPU, and "
      "no time is that of a GPU\n",
      stderr);
  return true;
}();

}  // namespace
