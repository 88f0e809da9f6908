// SPDX-License-Identifier: Apache-2.0
// What the commands ask of a GPU. backend.cpp answers where CUDA is built in, absent.cpp elsewhere;
// nothing here names CUDA, so that the commands are the same everywhere. The ranks of a run are
// virtual ranks of one GPU, the current device, or processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "schedule/cuda_schedule.hpp"
#include "uniep/case.hpp"
#include "uniep/job.hpp"

namespace uniep::tools {

struct CudaFacts {
  std::string missing;  // why the layer cannot run on a GPU here, without a full stop; or empty
  // The rest only where nothing is missing.
  std::string gpu;         // its name
  std::string capability;  // "9.0"
  std::string driver;      // "580.159.04", or the CUDA version that it serves
  std::string runtime;     // CUDA version that is built in
  int sms = 0;
  std::int64_t memory_bytes = 0;
  double peak_tflops = 0;    // of bf16 on tensor cores, at the highest clock
  bool is_emulated = false;  // on the CPU: bf16 by plain products, exp is the CPU's
};
// Never throws.
[[nodiscard]] CudaFacts cuda_facts();

// Errors: world with what is missing.
void require_cuda();

// For a process that forks ranks: a process that has used CUDA must not. Once asked, cuda_facts
// answers with what a child process saw. Errors: world if there is no such process.
void ask_facts_in_child();

struct CudaOptions {
  int num_ranks = 1;  // 1 to 16
  CudaSchedule schedule;
  bool backward = false;
  int repeats = 1;
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  bool processes = false;  // forked from this one; after ask_facts_in_child
  std::optional<Job> job;  // this process is a rank of it; see CudaRunOptions
};

// Ranks of one launch: all virtual ranks, or one.
[[nodiscard]] inline int ranks_of_launch(const CudaOptions& options) {
  return options.processes || options.job ? 1 : options.num_ranks;
}

// Blocks that a rank has with this schedule: blocks=0 gives 16, or fewer so that those of all ranks
// of a launch fit.
[[nodiscard]] CudaSchedule resolve(const CudaSchedule& schedule, int ranks_of_launch);

// Whether fusion=fused is there for the case's dtype and so many ranks of a launch.
[[nodiscard]] bool can_fuse(DType dtype, int ranks_of_launch);

// `options.repeats` operations on one group, the last one's results. Errors: invalid_argument for
// what the layer refuses; world where it cannot run, for memory, and for a wait that expired.
[[nodiscard]] CaseResult run_case_on_gpu(const Case& data, const CudaOptions& options);

// Symmetric memory of all ranks.
[[nodiscard]] std::int64_t symmetric_bytes(const Case& data, const CudaOptions& options);

// Milliseconds by CUDA events, an entry a repeat, operations queued back to back: "forward" and its
// stages "plan", "dispatch", "products", "combine", or fused "plan", "fused dispatch", "fused
// combine"; with backward also "backward", "layer" (both) and the stages "backward dispatch",
// "backward products", "backward combine", "backward wgrad", or fused "backward fused dispatch",
// "backward activation", "backward fused combine", "backward wgrad".
// Of `data` only sizes and routing are read; values are random. Errors: as run_case_on_gpu.
using Times = std::map<std::string, std::vector<double>>;
[[nodiscard]] Times time_layer(const Case& data, const CudaOptions& options, std::uint64_t seed);

// The products of a layer on tensor cores, over the rows of one rank's experts, bf16; gemm1 with
// the activation, and data gradients of activations and weight gradients in f32, as the layer has
// them.
enum class Product { gemm1, gemm2, dgrad2, dgrad1, wgrad2, wgrad1 };
struct ProductTask {
  Product product = Product::gemm1;
  std::vector<std::int64_t> expert_rows;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
};
// Milliseconds of a call, an entry a repeat; a repeat is as many calls as take some milliseconds.
// Errors: world where tensor cores or memory are not there.
[[nodiscard]] std::vector<double> time_product(const ProductTask& task, int repeats, int sms,
                                               std::uint64_t seed);

// Milliseconds of a copy of `bytes` from GPU memory to GPU memory, an entry a repeat.
[[nodiscard]] std::vector<double> time_copy(std::int64_t bytes, int repeats);

}  // namespace uniep::tools
