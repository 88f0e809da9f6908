// SPDX-License-Identifier: Apache-2.0
// The f32 layer forward and backward on ranks in threads. Groups and layers live on over all
// rounds, as they do in training; a round starts the ranks' threads and joins them.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "cpu/group.hpp"
#include "cpu/rank_layer.hpp"
#include "io/case.hpp"

namespace uniep::bench {

template <typename S>
std::span<const S> values(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const S*>(bytes.data()), bytes.size() / sizeof(S)};
}

// One group and what its ranks write.
class Layer {
 public:
  // `trace_capacity` records of each worker; 0: none.
  Layer(const Case& data, int num_ranks, const Schedule& schedule, std::int64_t trace_capacity = 0)
      : data_(data),
        group_(config_of(data, num_ranks, schedule, trace_capacity)),
        out_(data.x.size() / sizeof(float)),
        d_x_(out_.size()),
        d_weights_(data.topk_weights.size()),
        d_w1_(data.w1.size() / sizeof(float)),
        d_w2_(data.w2.size() / sizeof(float)) {
    for (int rank = 0; rank < num_ranks; ++rank) {
      layers_.push_back(std::make_unique<cpu::RankLayer<float>>(group_, rank));
    }
  }

  void run() {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < layers_.size(); ++rank) {
      threads.emplace_back([this, rank] { run_rank(static_cast<int>(rank)); });
    }
  }

  // One more round, in which all records of all ranks are counted.
  [[nodiscard]] std::int64_t count_records() {
    records_ = 0;
    counts_ = true;
    run();
    counts_ = false;
    return records_;
  }

 private:
  static cpu::GroupConfig config_of(const Case& data, int num_ranks, const Schedule& schedule,
                                    std::int64_t trace_capacity) {
    cpu::GroupConfig config;
    config.shape = {.num_ranks = num_ranks,
                    .num_experts = static_cast<int>(data.num_experts),
                    .topk = static_cast<int>(data.topk),
                    .hidden = data.hidden,
                    .max_tokens = share_size(data.num_tokens, num_ranks, 0),
                    .element_bytes = sizeof(float)};
    config.schedule = schedule;
    config.trace_capacity = trace_capacity;
    config.placement = make_contiguous_placement(config.shape.num_experts, num_ranks);
    return config;
  }

  void run_rank(int rank) {
    const int ranks = group_.config().shape.num_ranks;
    const auto cut = [](auto span, std::int64_t first, std::int64_t count, std::int64_t width) {
      return span.subspan(static_cast<std::size_t>(first * width),
                          static_cast<std::size_t>(count * width));
    };
    const auto tokens = [&](auto span, std::int64_t width) {
      return cut(span, share_start(data_.num_tokens, ranks, rank),
                 share_size(data_.num_tokens, ranks, rank), width);
    };
    const auto experts = [&](auto span, std::int64_t width) {
      return cut(span, share_start(data_.num_experts, ranks, rank),
                 share_size(data_.num_experts, ranks, rank), width);
    };
    const std::int64_t w = data_.ffn * data_.hidden;
    const auto w1 = experts(values<float>(data_.w1), 2 * w);
    const auto w2 = experts(values<float>(data_.w2), w);
    cpu::RankLayer<float>& layer = *layers_[static_cast<std::size_t>(rank)];
    const auto saved = layer.forward(
        {.ffn = data_.ffn,
         .x = tokens(values<float>(data_.x), data_.hidden),
         .topk_ids = tokens(std::span<const std::int32_t>(data_.topk_ids), data_.topk),
         .topk_weights = tokens(std::span<const float>(data_.topk_weights), data_.topk),
         .w1 = w1,
         .w2 = w2,
         .out = tokens(std::span(out_), data_.hidden)});
    const auto count = [&] {
      if (counts_) records_ += static_cast<std::int64_t>(layer.trace().events.size());
    };
    count();
    layer.backward(saved, {.d_out = tokens(values<float>(*data_.d_out), data_.hidden),
                           .w1 = w1,
                           .w2 = w2,
                           .d_x = tokens(std::span(d_x_), data_.hidden),
                           .d_topk_weights = tokens(std::span(d_weights_), data_.topk),
                           .d_w1 = experts(std::span(d_w1_), 2 * w),
                           .d_w2 = experts(std::span(d_w2_), w)});
    count();
  }

  const Case& data_;
  bool counts_ = false;
  std::atomic<std::int64_t> records_ = 0;
  cpu::Group group_;
  std::vector<std::unique_ptr<cpu::RankLayer<float>>> layers_;
  std::vector<float> out_, d_x_, d_weights_, d_w1_, d_w2_;
};

}  // namespace uniep::bench
