// SPDX-License-Identifier: Apache-2.0
// Runs a case on GPUs: its ranks are virtual ranks of one GPU, all in one launch, or processes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "cuda/split_layer.hpp"
#include "uniep/case.hpp"

namespace uniep {

struct CudaRunOptions {
  int num_ranks = 1;  // 1 to 16
  cuda::SplitSchedule schedule;
  cuda::GemmEngine gemm = cuda::GemmEngine::tensor_cores;
  bool backward = false;  // needs the case's d_out
  int repeats = 1;        // operations on the same group; the last one's results
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  // Each rank in a process of its own, forked from this one, which must not have used CUDA and
  // should have no other threads. Rank r has GPU r modulo their number.
  bool processes = false;
  // This process is one rank of a job; see RunOptions.
  std::optional<Job> job = std::nullopt;
};

[[nodiscard]] cuda::LayerShape layer_shape_of(const Case& data, int num_ranks,
                                              cuda::GemmEngine gemm);

// Where results of all ranks go, see CaseResult; those of a backward may be empty.
struct CaseSpans {
  std::span<std::byte> out, d_x;
  std::span<float> d_topk_weights, d_w1, d_w2;
};

// The tensors of a case on the GPU, each rank's by itself, for a layer that runs all ranks or
// those of `local`.
class CaseTensors {
 public:
  // Errors: invalid_argument where a backward lacks d_out; world for missing memory.
  CaseTensors(const Case& data, const Placement& placement, bool backward,
              std::optional<cuda::RankRange> local = std::nullopt);

  // For timing: of `data` only sizes and routing are read; the rest are random values, made on the
  // GPU, with the variances of make_case. Errors: world for missing memory.
  [[nodiscard]] static CaseTensors random(const Case& data, const Placement& placement,
                                          bool backward, std::uint64_t seed);

  [[nodiscard]] std::vector<cuda::ForwardTensors> forward() const;
  [[nodiscard]] std::vector<cuda::BackwardTensors> backward(bool accumulate = false) const;
  // d_w1 and d_w2 take these values, to be added to.
  void set_main_grad(float value);
  // Waits for the GPU.
  [[nodiscard]] CaseResult download() const;
  // The parts of the ranks that are here.
  void download(const CaseSpans& to) const;

 private:
  struct Rank {
    std::int64_t first_token = 0;
    std::int64_t num_tokens = 0;
    std::int64_t first_expert = 0;
    std::int64_t num_experts = 0;
    cuda::DeviceArray<std::byte> x, w1, w2, out, d_out, d_x;
    cuda::DeviceArray<std::int32_t> topk_ids;
    cuda::DeviceArray<float> topk_weights, d_topk_weights, d_w1, d_w2;
  };
  // Makes the `count` bytes of a tensor from byte `first` on.
  enum class Tensor { x, w1, w2, d_out };
  using Source =
      std::function<cuda::DeviceArray<std::byte>(Tensor, std::int64_t first, std::int64_t count)>;
  CaseTensors(const Case& data, const Placement& placement, bool backward,
              std::optional<cuda::RankRange> local, const Source& source);

  std::int64_t num_tokens_, topk_, row_bytes_, expert_elements_, num_experts_;
  std::vector<Rank> ranks_;
};

// Errors: as run_case; world also where there is no GPU.
[[nodiscard]] CaseResult run_case_cuda(const Case& data, const CudaRunOptions& options);

}  // namespace uniep
