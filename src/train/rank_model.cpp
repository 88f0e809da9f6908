// SPDX-License-Identifier: Apache-2.0
#include "train/rank_model.hpp"

#include <algorithm>

namespace uniep::train {
namespace {

template <typename T>
std::span<T> first(std::vector<T>& values, std::int64_t n) {
  return std::span(values).first(count(n));
}

}  // namespace

ChunkResult make_chunk_result(const Config& config, bool with_gradient) {
  const auto size = count(config.layers * config.experts);
  return {.loss = 0,
          .counts = std::vector<std::int64_t>(size),
          .probabilities = std::vector<double>(size),
          .gradient = std::vector<float>(with_gradient ? count(dense_size(config)) : 0)};
}

double balance_loss(const Config& config, std::span<const ChunkResult> chunks,
                    std::span<float> gradient) {
  const auto experts = static_cast<double>(config.experts);
  const auto tokens =
      static_cast<double>(static_cast<std::int64_t>(chunks.size()) * config.sequence);
  double sum = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    std::int64_t choices = 0;
    double probability = 0;
    for (const ChunkResult& chunk : chunks) {
      choices += chunk.counts[i];
      probability += chunk.probabilities[i];
    }
    const double share = static_cast<double>(choices) / (tokens * static_cast<double>(config.topk));
    sum += experts * share * (probability / tokens);
    gradient[i] = static_cast<float>(kBalanceWeight * experts * share / tokens);
  }
  return sum / static_cast<double>(config.layers);
}

RankModel::RankModel(const ModelState& state, const Text& text, Group& group, int rank,
                     std::int64_t max_sequences)
    : state_(state),
      config_(state.config),
      text_(text),
      layer_(group, rank),
      dense_(dense_view(state.config, std::span(state.dense.value))) {
  const auto experts = group.experts_of(rank);
  num_experts_ = static_cast<std::int64_t>(experts.size());
  first_expert_ = experts.empty() ? 0 : experts.front();
  const std::int64_t tokens = max_sequences * config_.sequence;
  const std::int64_t h = config_.hidden;
  const std::int64_t e = config_.experts;
  const std::int64_t k = config_.topk;
  const auto floats = [](std::int64_t n) { return std::vector<float>(count(n)); };
  for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
    blocks_.push_back({.x = floats(tokens * h),
                       .normed = floats(tokens * h),
                       .inverse_rms = floats(tokens),
                       .probabilities = floats(tokens * e),
                       .weights = floats(tokens * k),
                       .ids = std::vector<std::int32_t>(count(tokens * k))});
    d_w1_.push_back(floats(num_experts_ * 2 * config_.ffn * h));
    d_w2_.push_back(floats(num_experts_ * config_.ffn * h));
  }
  embedded_ = floats((config_.context + config_.sequence) * kEmbeddingWidth);
  d_windows_ = floats(config_.sequence * config_.context * kEmbeddingWidth);
  for (auto* rows : {&x_, &normed_, &d_x_, &d_normed_, &moved_}) *rows = floats(tokens * h);
  inverse_rms_ = floats(tokens);
  logits_ = floats(tokens * kBytes);
  d_weights_ = floats(tokens * k);
  d_logits_ = floats(tokens * e);
}

std::span<const float> RankModel::local(const std::vector<float>& all) const {
  const std::size_t of_expert = all.size() / count(config_.experts);
  return std::span(all).subspan(count(first_expert_) * of_expert, count(num_experts_) * of_expert);
}

std::span<const std::uint8_t> RankModel::bytes_of(std::size_t chunk) const {
  return std::span(text_.bytes)
      .subspan(count(windows_[chunk] - config_.context),
               count(config_.context + config_.sequence - 1));
}

void RankModel::forward(std::span<const std::int64_t> windows, bool with_experts, float loss_scale,
                        std::span<ChunkResult> results) {
  windows_.assign(windows.begin(), windows.end());
  tokens_ = static_cast<std::int64_t>(windows.size()) * config_.sequence;
  saved_.clear();
  const std::int64_t h = config_.hidden;
  for (std::size_t chunk = 0; chunk < windows.size(); ++chunk) {
    embed(bytes_of(chunk), dense_.embedding, embedded_);
    multiply(embedded_.data(), kEmbeddingWidth, dense_.mix, config_.sequence, h,
             config_.context * kEmbeddingWidth, rows(std::span(x_), chunk, h), scratch_);
  }
  for (std::int64_t layer = 0; with_experts && layer < config_.layers; ++layer) {
    forward_block(layer, results);
  }
  rms_norm(first(x_, tokens_ * h), dense_.final_norm, normed_, first(inverse_rms_, tokens_));
  multiply(normed_.data(), h, dense_.head, tokens_, kBytes, h, logits_, scratch_);
  for (std::size_t chunk = 0; chunk < windows.size(); ++chunk) {
    const auto targets =
        std::span(text_.bytes).subspan(count(windows_[chunk]), count(config_.sequence));
    results[chunk].loss =
        cross_entropy(rows(std::span(logits_), chunk, kBytes), targets, loss_scale);
  }
}

void RankModel::forward_block(std::int64_t layer, std::span<ChunkResult> results) {
  const std::int64_t h = config_.hidden;
  const std::int64_t e = config_.experts;
  Block& block = blocks_[count(layer)];
  const auto x = first(x_, tokens_ * h);
  std::copy(x.begin(), x.end(), block.x.begin());
  const auto normed = first(block.normed, tokens_ * h);
  const auto probabilities = first(block.probabilities, tokens_ * e);
  const auto ids = first(block.ids, tokens_ * config_.topk);
  const auto weights = first(block.weights, tokens_ * config_.topk);
  rms_norm(x, dense_.norm[count(layer)], normed, first(block.inverse_rms, tokens_));
  multiply(normed.data(), h, dense_.router[count(layer)], tokens_, e, h, probabilities, scratch_);
  route(probabilities, e, config_.topk, ids, weights);
  for (std::size_t chunk = 0; chunk < windows_.size(); ++chunk) {
    const auto counts = std::span(results[chunk].counts).subspan(count(layer * e), count(e));
    const auto sums = std::span(results[chunk].probabilities).subspan(count(layer * e), count(e));
    std::fill(counts.begin(), counts.end(), 0);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (const std::int32_t id : rows(ids, chunk, config_.topk)) {
      ++counts[static_cast<std::size_t>(id)];
    }
    const auto p = rows(probabilities, chunk, e);
    for (std::size_t i = 0; i < p.size(); ++i) sums[i % count(e)] += static_cast<double>(p[i]);
  }
  const auto out = first(moved_, tokens_ * h);
  saved_.push_back(layer_.forward({.x = std::as_bytes(normed),
                                   .topk_ids = ids,
                                   .topk_weights = weights,
                                   .w1 = std::as_bytes(local(state_.w1[count(layer)].value)),
                                   .w2 = std::as_bytes(local(state_.w2[count(layer)].value)),
                                   .out = std::as_writable_bytes(out)}));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += out[i];
}

void RankModel::backward(std::span<const float> balance, std::span<ChunkResult> results) {
  const std::int64_t h = config_.hidden;
  const std::int64_t s = config_.sequence;
  const std::int64_t window = config_.context * kEmbeddingWidth;
  std::vector<Dense<float>> gradients;
  for (ChunkResult& result : results) {
    gradients.push_back(dense_view(config_, std::span(result.gradient)));
  }
  multiply_back(logits_, dense_.head, tokens_, kBytes, h, d_normed_, scratch_);
  std::fill(d_x_.begin(), d_x_.end(), 0.0F);
  for (std::size_t chunk = 0; chunk < gradients.size(); ++chunk) {
    const auto normed = rows(std::span(normed_), chunk, h);
    multiply_weights(rows(std::span(logits_), chunk, kBytes), normed.data(), h, s, kBytes, h,
                     gradients[chunk].head, scratch_);
    rms_norm_backward(rows(std::span(x_), chunk, h), dense_.final_norm,
                      rows(std::span(inverse_rms_), chunk, 1), rows(std::span(d_normed_), chunk, h),
                      rows(std::span(d_x_), chunk, h), gradients[chunk].final_norm);
  }
  for (std::int64_t layer = config_.layers - 1; layer >= 0; --layer) {
    backward_block(layer, balance.subspan(count(layer * config_.experts), count(config_.experts)),
                   gradients);
  }
  for (std::size_t chunk = 0; chunk < gradients.size(); ++chunk) {
    const auto d_x = rows(std::span(d_x_), chunk, h);
    embed(bytes_of(chunk), dense_.embedding, embedded_);
    multiply_weights(d_x, embedded_.data(), kEmbeddingWidth, s, h, window, gradients[chunk].mix,
                     scratch_);
    multiply_back(d_x, dense_.mix, s, h, window, d_windows_, scratch_);
    embed_backward(bytes_of(chunk), d_windows_, config_.context, gradients[chunk].embedding);
  }
}

void RankModel::backward_block(std::int64_t layer, std::span<const float> balance,
                               std::span<Dense<float>> gradients) {
  const std::int64_t h = config_.hidden;
  const std::int64_t e = config_.experts;
  Block& block = blocks_[count(layer)];
  const auto d_x = first(d_x_, tokens_ * h);
  const auto d_normed = first(moved_, tokens_ * h);
  const auto d_weights = first(d_weights_, tokens_ * config_.topk);
  layer_.backward(saved_[count(layer)], {.d_out = std::as_bytes(d_x),
                                         .w1 = std::as_bytes(local(state_.w1[count(layer)].value)),
                                         .w2 = std::as_bytes(local(state_.w2[count(layer)].value)),
                                         .d_x = std::as_writable_bytes(d_normed),
                                         .d_topk_weights = d_weights,
                                         .d_w1 = d_w1_[count(layer)],
                                         .d_w2 = d_w2_[count(layer)]});
  route_backward(first(block.probabilities, tokens_ * e), first(block.ids, tokens_ * config_.topk),
                 d_weights, balance, first(d_logits_, tokens_ * e));
  multiply_back(d_logits_, dense_.router[count(layer)], tokens_, e, h, d_normed_, scratch_);
  for (std::size_t i = 0; i < d_normed.size(); ++i) d_normed[i] += d_normed_[i];
  for (std::size_t chunk = 0; chunk < gradients.size(); ++chunk) {
    const auto normed = rows(std::span(block.normed), chunk, h);
    multiply_weights(rows(std::span(d_logits_), chunk, e), normed.data(), h, config_.sequence, e, h,
                     gradients[chunk].router[count(layer)], scratch_);
    // The residual path is d_x itself; the norm's adds to it.
    rms_norm_backward(rows(std::span(block.x), chunk, h), dense_.norm[count(layer)],
                      rows(std::span(block.inverse_rms), chunk, 1), rows(d_normed, chunk, h),
                      rows(d_x, chunk, h), gradients[chunk].norm[count(layer)]);
  }
}

}  // namespace uniep::train
