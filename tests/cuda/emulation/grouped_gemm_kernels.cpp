// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM's kernels as they are, compiled for this machine.
#include <array>
#include <cstddef>

#include "cuda/kernels/grouped_gemm.cuh"
#include "cuda/kernels/grouped_gemm_dgrad.cu"
#include "cuda/kernels/grouped_gemm_dgrad_f32.cu"
#include "cuda/kernels/grouped_gemm_fprop.cu"
#include "cuda/kernels/grouped_gemm_fprop_swiglu.cu"
#include "cuda/kernels/grouped_gemm_wgrad.cu"
#include "cuda/kernels/grouped_gemm_wgrad_f32.cu"

namespace uniep::cuda {
namespace {

struct SharedName {
  std::size_t offset;
  std::size_t count;
  const char* name;
};

// For reports of the emulation.
std::string name_of_storage(std::uint32_t address) {
  const std::array<SharedName, 5> names{
      {{offsetof(SharedStorage, full), kNumPipeStages, "full"},
       {offsetof(SharedStorage, empty), kNumPipeStages, "empty"},
       {offsetof(SharedStorage, ticket_full), kNumTickets, "ticket_full"},
       {offsetof(SharedStorage, ticket_read), kNumTickets, "ticket_read"},
       {offsetof(SharedStorage, ticket_wanted), 1, "ticket_wanted"}}};
  for (const SharedName& entry : names) {
    if (address < entry.offset || address >= entry.offset + 8 * entry.count) continue;
    const std::string index = std::to_string((address - entry.offset) / 8);
    return entry.count == 1 ? entry.name : std::string(entry.name) + "[" + index + "]";
  }
  return "";
}

[[maybe_unused]] const bool names_storage = [] {
  emulation::name_of_shared = name_of_storage;
  return true;
}();

}  // namespace
}  // namespace uniep::cuda
