// SPDX-License-Identifier: Apache-2.0
// The answers of a build without CUDA.
#include "base/error.hpp"
#include "cuda/backend.hpp"

namespace uniep::tools {
namespace {

constexpr const char* kMissing =
    "this build has no CUDA; where nvcc is on PATH, cmake --preset cuda makes one that has";

[[noreturn]] void refuse() { throw_world("--backend cuda cannot run here: {}", kMissing); }

}  // namespace

CudaFacts cuda_facts() {
  CudaFacts facts;
  facts.missing = kMissing;
  return facts;
}

void require_cuda() { refuse(); }
void ask_facts_in_child() {}
CudaSchedule resolve(const CudaSchedule&, int) { refuse(); }
bool can_fuse(DType, int) { return false; }
CaseResult run_case_on_gpu(const Case&, const CudaOptions&) { refuse(); }
std::int64_t symmetric_bytes(const Case&, const CudaOptions&) { refuse(); }
Times time_layer(const Case&, const CudaOptions&, std::uint64_t) { refuse(); }
std::vector<double> time_product(const ProductTask&, int, int, std::uint64_t) { refuse(); }
std::vector<double> time_copy(std::int64_t, int) { refuse(); }

}  // namespace uniep::tools
