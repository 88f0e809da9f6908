// SPDX-License-Identifier: Apache-2.0
// One rank's forward and backward over its sequences. The experts are run by uniep::Layer, whose
// calls are collective; everything else is this rank's own work, a chunk (sequence) at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "train/model_state.hpp"
#include "train/pieces.hpp"
#include "train/text.hpp"
#include "uniep/layer.hpp"

namespace uniep::train {

// What a chunk adds to the sums over the batch. Chunks are summed in ascending order.
struct ChunkResult {
  double loss = 0;                    // sum of -ln p over its tokens
  std::vector<std::int64_t> counts;   // [layers, E] choices of each expert
  std::vector<double> probabilities;  // [layers, E] sums over its tokens
  std::vector<float> gradient;        // of the dense array; empty where none is asked for
};
[[nodiscard]] ChunkResult make_chunk_result(const Config& config, bool with_gradient);

// The load-balancing loss of a batch from all its chunks, the mean over layers, and its derivative
// gradient [layers, E], times kBalanceWeight, by any token's probability of an expert, in the sum
// over layers. It is E Σ_e f_e P_e (Fedus, Zoph and Shazeer, "Switch Transformers", 2022): f_e, the
// share of choices that e got, is exact and taken as given; P_e is its mean probability.
[[nodiscard]] double balance_loss(const Config& config, std::span<const ChunkResult> chunks,
                                  std::span<float> gradient);

class RankModel {
 public:
  // Room for `max_sequences` of them; the state's experts of this rank are [expert, + experts).
  RankModel(const ModelState& state, const Text& text, Group& group, int rank,
            std::int64_t max_sequences);

  // Collective unless `with_experts` is false, which leaves out what they add. windows[i] is the
  // first predicted byte of a sequence, results[i] its loss, counts and probabilities. loss_scale
  // is that of the derivative.
  void forward(std::span<const std::int64_t> windows, bool with_experts, float loss_scale,
               std::span<ChunkResult> results);

  // Collective, after a forward with experts; writes each chunk's gradient and, by layer, those of
  // this rank's experts. balance: [layers, E] derivative of the balancing loss by a token's
  // probability.
  void backward(std::span<const float> balance, std::span<ChunkResult> results);

  [[nodiscard]] Layer& layer() { return layer_; }
  [[nodiscard]] std::int64_t first_expert() const { return first_expert_; }
  [[nodiscard]] std::span<const float> d_w1(std::int64_t layer) const {
    return d_w1_[count(layer)];
  }
  [[nodiscard]] std::span<const float> d_w2(std::int64_t layer) const {
    return d_w2_[count(layer)];
  }

 private:
  // Kept of a layer for the way back.
  struct Block {
    std::vector<float> x, normed, inverse_rms, probabilities, weights;
    std::vector<std::int32_t> ids;
  };
  [[nodiscard]] std::span<const float> local(const std::vector<float>& all) const;
  [[nodiscard]] std::span<const std::uint8_t> bytes_of(std::size_t chunk) const;
  void forward_block(std::int64_t layer, std::span<ChunkResult> results);
  void backward_block(std::int64_t layer, std::span<const float> balance,
                      std::span<Dense<float>> gradients);
  // The rows of `chunk` in an array of `width` elements a token.
  template <typename T>
  [[nodiscard]] std::span<T> rows(std::span<T> all, std::size_t chunk, std::int64_t width) const {
    const auto size = count(config_.sequence * width);
    return all.subspan(chunk * size, size);
  }

  const ModelState& state_;
  const Config& config_;
  const Text& text_;
  Layer layer_;
  std::int64_t first_expert_ = 0;
  std::int64_t num_experts_ = 0;
  std::vector<std::int64_t> windows_;
  std::int64_t tokens_ = 0;
  Dense<const float> dense_;
  std::vector<Block> blocks_;
  std::vector<Saved> saved_;
  std::vector<float> embedded_, x_, normed_, inverse_rms_, logits_;  // embedded_: a chunk's
  std::vector<float> d_x_, d_normed_, d_weights_, d_logits_, d_windows_;
  std::vector<float> moved_;  // what the experts add, and on the way back what they return
  std::vector<std::vector<float>> d_w1_, d_w2_;
  cpu::GemmScratch scratch_;
};

}  // namespace uniep::train
