// SPDX-License-Identifier: Apache-2.0
#include "train/trainer.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/memory.hpp"
#include "topo/placement.hpp"
#include "train/exchange.hpp"
#include "train/optimizer.hpp"
#include "train/rank_model.hpp"

namespace uniep::train {
namespace {

// About what a run takes beside the model: a gradient a chunk, and activations.
double run_bytes(const Config& c) {
  const auto tokens = static_cast<double>(c.batch * c.sequence);
  const auto per_token = static_cast<double>((2 * c.layers + 5) * c.hidden + kBytes +
                                             2 * c.layers * (c.experts + 2 * c.topk) +
                                             c.layers * c.topk * (c.hidden + 3 * c.ffn));
  return 4 * (static_cast<double>(c.batch * dense_size(c)) + tokens * per_token +
              3.0 * static_cast<double>(c.layers * c.experts * c.hidden * c.ffn));
}

GroupOptions group_options(const Config& config, const TrainOptions& options) {
  GroupOptions group;
  group.num_ranks = options.num_ranks;
  group.num_experts = static_cast<int>(config.experts);
  group.topk = static_cast<int>(config.topk);
  group.hidden = config.hidden;
  group.ffn = config.ffn;
  group.max_tokens_per_rank = share_size(config.batch, options.num_ranks, 0) * config.sequence;
  group.dtype = DType::f32;
  group.schedule = options.schedule;
  group.wait_bound = options.wait_bound;
  return group;
}

// What the rank threads share. Each writes its own chunks, its slice of the dense array and its
// experts; others read them after the next meeting.
class Trainer {
 public:
  Trainer(ModelState& state, const Text& text, const TrainOptions& options)
      : state_(state),
        config_(state.config),
        text_(text),
        options_(options),
        group_(group_options(config_, options)),
        exchange_(options.num_ranks, options.wait_bound),
        tensors_(dense_tensors(config_)),
        loads_(count(options.num_ranks)) {
    require_memory(run_bytes(config_), "the training run");
    for (std::int64_t chunk = 0; chunk < config_.batch; ++chunk) {
      chunks_.push_back(make_chunk_result(config_, true));
    }
    losses_.resize(text.held_out().size() / count(config_.sequence));
  }

  Evaluation run() {
    if (options_.on_start) options_.on_start();
    {
      std::vector<std::jthread> ranks;
      for (int rank = 0; rank < options_.num_ranks; ++rank) {
        try {
          ranks.emplace_back([this, rank] { run_rank(rank); });
        } catch (const std::system_error& error) {
          // The ranks that did start wait in their first meeting.
          exchange_.fail(std::make_exception_ptr(Error(
              ErrorCode::world,
              fmt::format("the system refused a thread for rank {} of {}: {}; use fewer ranks",
                          rank, options_.num_ranks, error.code().message()))));
          break;
        }
      }
    }
    exchange_.rethrow();
    for (const auto& load : loads_) {
      for (std::size_t i = 0; i < load.size(); ++i) evaluation_.load[i] += load[i];
    }
    return evaluation_;
  }

 private:
  void run_rank(int rank) {
    std::optional<RankModel> model;
    try {
      model.emplace(state_, text_, group_, rank, share_size(config_.batch, options_.num_ranks, 0));
      exchange_.meet(rank, "begin");
      while (state_.step < options_.steps) step(rank, *model);
      const double with = evaluate(rank, *model, true);
      const double without = evaluate(rank, *model, false);
      if (rank == 0) {
        evaluation_.loss = with;
        evaluation_.loss_without_experts = without;
        evaluation_.load.resize(count(config_.layers * config_.experts));
      }
    } catch (const std::exception& error) {
      exchange_.fail(std::current_exception());
      // Peers may be inside the layer: end its operation too.
      try {
        if (model) model->layer().prepare([&error] { throw_world("{}", error.what()); });
      } catch (const std::exception&) {  // the error that was just made
      }
    }
  }

  void step(int rank, RankModel& model) {
    const std::int64_t number = state_.step + 1;
    if (options_.before_step) options_.before_step(rank, number);
    const std::int64_t begin = share_start(config_.batch, options_.num_ranks, rank);
    const std::int64_t mine = share_size(config_.batch, options_.num_ranks, rank);
    std::vector<std::int64_t> windows;
    for (std::int64_t i = begin; i < begin + mine; ++i) {
      windows.push_back(window_of(text_, config_, state_.step, i));
    }
    const auto results = std::span(chunks_).subspan(count(begin), count(mine));
    const std::int64_t tokens = config_.batch * config_.sequence;
    model.forward(windows, true, 1.0F / static_cast<float>(tokens), results);
    exchange_.meet(rank, "add up the losses");
    // Every rank adds all chunks in the same order, and so knows the same.
    std::vector<float> balance_gradient(count(config_.layers * config_.experts));
    const StepResult result{.step = number,
                            .loss = sum_losses(),
                            .balance = balance_loss(config_, chunks_, balance_gradient)};
    if (!std::isfinite(result.loss)) {
      throw_invalid("the loss of step {} is {}; use a smaller learning rate than {}", number,
                    result.loss, config_.learning_rate);
    }
    model.backward(balance_gradient, results);
    exchange_.meet(rank, "add up the gradients");
    const AdamWStep update(config_.learning_rate, number);
    update_dense(rank, update);
    update_experts(model, update);
    if (rank == 0) finish_step(result);
    exchange_.meet(rank, "end the step");
    if (rank == 0 && options_.after_step) options_.after_step(state_, result);
  }

  [[nodiscard]] double sum_losses() const {
    double sum = 0;
    for (const ChunkResult& chunk : chunks_) sum += chunk.loss;
    return sum / static_cast<double>(config_.batch * config_.sequence);
  }

  // This rank's slice of the dense array: its gradient is the sum over all chunks, ascending.
  void update_dense(int rank, const AdamWStep& update) {
    const std::int64_t size = dense_size(config_);
    const std::int64_t begin = share_start(size, options_.num_ranks, rank);
    const std::int64_t end = begin + share_size(size, options_.num_ranks, rank);
    std::vector<float> sum(count(end - begin));
    for (const ChunkResult& chunk : chunks_) {
      const float* from = chunk.gradient.data() + begin;
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += from[i];
    }
    for (const DenseTensor& tensor : tensors_) {
      const std::int64_t low = std::max(begin, tensor.offset);
      const std::int64_t high = std::min(end, tensor.offset + tensor.size);
      if (low >= high) continue;
      const auto part = [&](std::vector<float>& all) {
        return std::span(all).subspan(count(low), count(high - low));
      };
      adamw(update, std::span(sum).subspan(count(low - begin), count(high - low)), tensor.decays,
            part(state_.dense.value), part(state_.dense.m), part(state_.dense.v));
    }
  }

  void update_experts(const RankModel& model, const AdamWStep& update) {
    const auto apply = [&](Trained& weights, std::span<const float> gradient) {
      const std::size_t of_expert = weights.value.size() / count(config_.experts);
      const auto part = [&](std::vector<float>& all) {
        return std::span(all).subspan(count(model.first_expert()) * of_expert, gradient.size());
      };
      adamw(update, gradient, true, part(weights.value), part(weights.m), part(weights.v));
    };
    for (std::int64_t layer = 0; layer < config_.layers; ++layer) {
      apply(state_.w1[count(layer)], model.d_w1(layer));
      apply(state_.w2[count(layer)], model.d_w2(layer));
    }
  }

  void finish_step(const StepResult& result) {
    state_.step = result.step;
    const std::array<double, 2> losses{result.loss, result.balance};
    state_.loss_hash = fnv1a(std::as_bytes(std::span(losses)), state_.loss_hash);
  }

  // Mean loss over the held-out bytes, a batch of sequences at a time.
  double evaluate(int rank, RankModel& model, bool with_experts) {
    const auto num_windows = static_cast<std::int64_t>(losses_.size());
    auto& load = loads_[count(rank)];
    load.resize(count(config_.layers * config_.experts));
    std::vector<ChunkResult> results;
    for (std::int64_t first = 0; first < num_windows; first += config_.batch) {
      const std::int64_t size = std::min(config_.batch, num_windows - first);
      const std::int64_t begin = first + share_start(size, options_.num_ranks, rank);
      const std::int64_t mine = share_size(size, options_.num_ranks, rank);
      std::vector<std::int64_t> windows;
      for (std::int64_t i = begin; i < begin + mine; ++i) {
        windows.push_back(text_.train_end + i * config_.sequence);
      }
      results.resize(count(mine), make_chunk_result(config_, false));
      model.forward(windows, with_experts, 0, results);
      for (std::int64_t i = 0; i < mine; ++i) {
        const ChunkResult& result = results[count(i)];
        losses_[count(begin + i)] = result.loss;
        for (std::size_t e = 0; with_experts && e < load.size(); ++e) load[e] += result.counts[e];
      }
    }
    exchange_.meet(rank, "add up the held-out losses");
    const double sum = std::accumulate(losses_.begin(), losses_.end(), 0.0);
    exchange_.meet(rank, "end the evaluation");
    return sum / static_cast<double>(num_windows * config_.sequence);
  }

  ModelState& state_;
  const Config config_;
  const Text& text_;
  const TrainOptions& options_;
  Group group_;
  Exchange exchange_;
  const std::vector<DenseTensor> tensors_;
  std::vector<ChunkResult> chunks_;               // of the batch
  std::vector<double> losses_;                    // a held-out sequence
  std::vector<std::vector<std::int64_t>> loads_;  // a rank
  Evaluation evaluation_;
};

}  // namespace

Evaluation train(ModelState& state, const Text& text, const TrainOptions& options) {
  return Trainer(state, text, options).run();
}

}  // namespace uniep::train
