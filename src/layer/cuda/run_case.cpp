// SPDX-License-Identifier: Apache-2.0
#include "layer/cuda/run_case.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "layer/cuda/random_pattern.hpp"
#include "layer/cuda/run_processes.hpp"
#include "layer/run_case.hpp"

namespace uniep {
namespace {

using cuda::DeviceArray;

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_world("{}: {}", what, cudaGetErrorString(error));
}

template <typename T>
DeviceArray<T> upload(const std::vector<T>& all, std::int64_t first, std::int64_t count,
                      const char* what) {
  DeviceArray<T> array(count, what);
  if (count == 0) return array;
  check_cuda(cudaMemcpy(array.get(), all.data() + first,
                        static_cast<std::size_t>(count) * sizeof(T), cudaMemcpyHostToDevice),
             "a tensor cannot be copied to the GPU");
  return array;
}

template <typename T>
void download_to(std::span<T> all, std::int64_t first, const DeviceArray<T>& array) {
  if (array.count() == 0) return;
  check_cuda(
      cudaMemcpy(all.data() + first, array.get(),
                 static_cast<std::size_t>(array.count()) * sizeof(T), cudaMemcpyDeviceToHost),
      "a result cannot be copied from the GPU");
}

}  // namespace

cuda::LayerShape layer_shape_of(const Case& data, int num_ranks, cuda::GemmEngine gemm) {
  const std::vector<std::int64_t> tokens = tokens_of_ranks(data, num_ranks);
  return {.topk = static_cast<int>(data.topk),
          .hidden = data.hidden,
          .ffn = data.ffn,
          .max_tokens = *std::max_element(tokens.begin(), tokens.end()),
          .dtype = data.dtype,
          .gemm = gemm};
}

CaseTensors::CaseTensors(const Case& data, const Placement& placement, bool backward,
                         std::optional<cuda::RankRange> local)
    : CaseTensors(data, placement, backward, local,
                  [&data](Tensor tensor, std::int64_t first, std::int64_t count) {
                    switch (tensor) {
                      case Tensor::x:
                        return upload(data.x, first, count, "x");
                      case Tensor::w1:
                        return upload(data.w1, first, count, "w1");
                      case Tensor::w2:
                        return upload(data.w2, first, count, "w2");
                      case Tensor::d_out:
                        break;
                    }
                    if (!data.d_out) {
                      throw_invalid("the case has no d_out, which a backward pass needs");
                    }
                    return upload(*data.d_out, first, count, "d_out");
                  }) {}

CaseTensors CaseTensors::random(const Case& data, const Placement& placement, bool backward,
                                std::uint64_t seed) {
  const RandomPattern pattern(data.dtype, seed);
  const auto scale = [](std::int64_t chain) { return 1.0F / std::sqrt(static_cast<float>(chain)); };
  return {data, placement, backward, std::nullopt,
          [&](Tensor tensor, std::int64_t, std::int64_t count) {
            switch (tensor) {
              case Tensor::x:
                return pattern.make(count, 1, "x");
              case Tensor::w1:
                return pattern.make(count, scale(data.hidden), "w1");
              case Tensor::w2:
                return pattern.make(count, scale(data.ffn), "w2");
              case Tensor::d_out:
                break;
            }
            return pattern.make(count, 1, "d_out");
          }};
}

CaseTensors::CaseTensors(const Case& data, const Placement& placement, bool backward,
                         std::optional<cuda::RankRange> local, const Source& source)
    : num_tokens_(data.num_tokens),
      topk_(data.topk),
      row_bytes_(data.hidden * (data.dtype == DType::bf16 ? 2 : 4)),
      expert_elements_(data.hidden * data.ffn),
      num_experts_(data.num_experts) {
  const std::vector<std::int64_t> tokens = tokens_of_ranks(data, placement.num_ranks);
  const std::int64_t expert_bytes = row_bytes_ * data.ffn;
  std::int64_t token = 0;
  std::int64_t expert = 0;
  const cuda::RankRange here = local.value_or(cuda::RankRange{0, placement.num_ranks});
  for (int rank = 0; rank < here.first + here.count; ++rank) {
    Rank r;
    r.first_token = token;
    r.num_tokens = tokens[static_cast<std::size_t>(rank)];
    r.first_expert = expert;
    r.num_experts = placement.num_local_experts(rank);
    token += r.num_tokens;
    expert += r.num_experts;
    if (rank < here.first) continue;
    const std::int64_t first_choice = r.first_token * topk_;
    const std::int64_t choices = r.num_tokens * topk_;
    const std::int64_t bytes = r.num_tokens * row_bytes_;
    r.x = source(Tensor::x, r.first_token * row_bytes_, bytes);
    r.w1 = source(Tensor::w1, r.first_expert * 2 * expert_bytes, r.num_experts * 2 * expert_bytes);
    r.w2 = source(Tensor::w2, r.first_expert * expert_bytes, r.num_experts * expert_bytes);
    r.topk_ids = upload(data.topk_ids, first_choice, choices, "topk_ids");
    r.topk_weights = upload(data.topk_weights, first_choice, choices, "topk_weights");
    r.out = {bytes, "out"};
    if (backward) {
      r.d_out = source(Tensor::d_out, r.first_token * row_bytes_, bytes);
      r.d_x = {bytes, "d_x"};
      r.d_topk_weights = {choices, "d_topk_weights"};
      r.d_w1 = {r.num_experts * 2 * expert_elements_, "d_w1"};
      r.d_w2 = {r.num_experts * expert_elements_, "d_w2"};
    }
    ranks_.push_back(std::move(r));
  }
}

std::vector<cuda::ForwardTensors> CaseTensors::forward() const {
  std::vector<cuda::ForwardTensors> all;
  for (const Rank& r : ranks_) {
    all.push_back({.num_tokens = r.num_tokens,
                   .x = r.x.get(),
                   .topk_ids = r.topk_ids.get(),
                   .topk_weights = r.topk_weights.get(),
                   .w1 = r.w1.get(),
                   .w2 = r.w2.get(),
                   .out = r.out.get()});
  }
  return all;
}

std::vector<cuda::BackwardTensors> CaseTensors::backward(bool accumulate) const {
  std::vector<cuda::BackwardTensors> all;
  for (const Rank& r : ranks_) {
    all.push_back({.d_out = r.d_out.get(),
                   .w1 = r.w1.get(),
                   .w2 = r.w2.get(),
                   .d_x = r.d_x.get(),
                   .d_topk_weights = r.d_topk_weights.get(),
                   .d_w1 = r.d_w1.get(),
                   .d_w2 = r.d_w2.get(),
                   .accumulate = accumulate});
  }
  return all;
}

void CaseTensors::set_main_grad(float value) {
  for (Rank& r : ranks_) {
    for (DeviceArray<float>* gradient : {&r.d_w1, &r.d_w2}) {
      const std::vector<float> values(static_cast<std::size_t>(gradient->count()), value);
      *gradient = upload(values, 0, gradient->count(), "a main gradient");
    }
  }
}

CaseResult CaseTensors::download() const {
  CaseResult result;
  const bool backward =
      std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.d_w1.count() > 0; });
  const auto bytes = static_cast<std::size_t>(num_tokens_ * row_bytes_);
  const auto weights = static_cast<std::size_t>(num_experts_ * expert_elements_);
  result.out.resize(bytes);
  if (backward) {
    result.d_x.resize(bytes);
    result.d_topk_weights.resize(static_cast<std::size_t>(num_tokens_ * topk_));
    result.d_w1.resize(2 * weights);
    result.d_w2.resize(weights);
  }
  download({result.out, result.d_x, result.d_topk_weights, result.d_w1, result.d_w2});
  return result;
}

void CaseTensors::download(const CaseSpans& to) const {
  check_cuda(cudaDeviceSynchronize(), "a kernel failed");
  for (const Rank& r : ranks_) {
    download_to(to.out, r.first_token * row_bytes_, r.out);
    download_to(to.d_x, r.first_token * row_bytes_, r.d_x);
    download_to(to.d_topk_weights, r.first_token * topk_, r.d_topk_weights);
    download_to(to.d_w1, r.first_expert * 2 * expert_elements_, r.d_w1);
    download_to(to.d_w2, r.first_expert * expert_elements_, r.d_w2);
  }
}

CaseResult run_case_cuda(const Case& data, const CudaRunOptions& options) {
  if (options.processes || options.job) return run_case_cuda_processes(data, options);
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), options.num_ranks);
  const cuda::LayerShape shape = layer_shape_of(data, options.num_ranks, options.gemm);
  const cuda::SymmetricMemory memory(
      options.num_ranks, cuda::SplitLayer::bytes_per_rank(shape, options.schedule, placement),
      options.wait_bound);
  cuda::SplitLayer layer(memory, shape, options.schedule, placement, 0, options.num_ranks);
  const CaseTensors tensors(data, placement, options.backward);
  for (int i = 0; i < options.repeats; ++i) {
    cuda::SplitLayer::Saved saved = layer.forward(tensors.forward(), nullptr);
    if (options.backward) layer.backward(saved, tensors.backward(), nullptr);
    layer.check(saved, nullptr);
    layer.release(std::move(saved));
  }
  return tensors.download();
}

}  // namespace uniep
