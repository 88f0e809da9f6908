// SPDX-License-Identifier: Apache-2.0
// What the layer tests share: small random cases, a group of ranks as threads that outlives its
// operations, and outputs that are filled with NaN and fenced by canaries before every call.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "cpu/rank_layer.hpp"
#include "io/case.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"

namespace uniep::test {

struct Sizes {
  std::int64_t tokens = 24;  // over all ranks
  std::int64_t hidden = 24;
  std::int64_t ffn = 40;
  int experts = 8;
  int topk = 2;
};

inline Case random_case(const Sizes& s, DType dtype, const std::string& routing = "W0",
                        int ranks = 1, double mask = 0, std::uint64_t seed = 1) {
  return make_case({"test", s.hidden, s.ffn, s.experts, s.topk, s.tokens}, dtype,
                   parse_routing(routing), ranks, mask, seed, true);
}

inline std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

template <typename S>
std::span<const S> values_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const S*>(bytes.data()), bytes.size() / sizeof(S)};
}
template <typename S>
std::span<S> values_of(std::vector<std::byte>& bytes) {
  return {reinterpret_cast<S*>(bytes.data()), bytes.size() / sizeof(S)};
}

// The call works in both dtypes: body(S{}) with S the storage type of the case.
template <typename Body>
void with_storage(const Case& data, Body body) {
  if (data.dtype == DType::bf16) {
    body(Bf16{});
  } else {
    body(float{});
  }
}

inline void expect_equal(const Case& data, const CaseResult& expected, const CaseResult& got,
                         const std::string& what) {
  EXPECT_EQ(describe_difference(data, expected, got), "") << what;
}

inline CaseResult run(const Case& data, int ranks, const Schedule& schedule, int repeats = 1) {
  RunOptions options;
  options.num_ranks = ranks;
  options.schedule = schedule;
  options.backward = true;
  options.repeats = repeats;
  return run_case(data, options);
}

// Sequential execution against every rank count and `schedules` schedules of each, the default one
// first.
inline void expect_invariant(const Case& data, const std::vector<int>& ranks, int schedules,
                             std::uint64_t seed = 1) {
  const CaseResult expected = run_case_sequential(data, true);
  for (const int num_ranks : ranks) {
    for (int i = 0; i < schedules; ++i) {
      const Schedule schedule =
          i == 0 ? Schedule{}
                 : sample_schedule(seed, static_cast<std::uint64_t>(num_ranks * 1000 + i));
      expect_equal(data, expected, run(data, num_ranks, schedule),
                   fmt::format("{} ranks, schedule {}", num_ranks, to_string(schedule)));
      if (::testing::Test::HasFailure()) return;
    }
  }
}

// Storage with a fence on both sides.
template <typename T>
class Fenced {
 public:
  explicit Fenced(std::size_t count) : all_(count + 2 * kFence) { poison(); }

  [[nodiscard]] std::span<T> span() {
    return std::span<T>(all_).subspan(kFence, all_.size() - 2 * kFence);
  }
  void poison() {
    std::memset(static_cast<void*>(all_.data()), kCanary, all_.size() * sizeof(T));
    std::memset(static_cast<void*>(span().data()), 0xFF, span().size() * sizeof(T));  // NaN
  }
  [[nodiscard]] bool intact() const {
    const auto bytes = std::as_bytes(std::span(all_));
    constexpr std::size_t kBytes = kFence * sizeof(T);
    for (std::size_t i = 0; i < kBytes; ++i) {
      if (bytes[i] != std::byte{kCanary} || bytes[bytes.size() - 1 - i] != std::byte{kCanary}) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kFence = 64;
  static constexpr unsigned char kCanary = 0xC5;
  std::vector<T> all_;
};

// One micro-batch split over ranks: inputs of each, fenced outputs of each, what forward saved.
template <typename S>
class Step {
 public:
  Step(const Case& data, const Placement& placement) : data_(data), placement_(placement) {
    const auto tokens = tokens_of_ranks(data, placement.num_ranks);
    std::int64_t token = 0;
    for (int rank = 0; rank < placement.num_ranks; ++rank) {
      ranks_.push_back(std::make_unique<Rank>(data, placement, rank, token, tokens[at(rank)]));
      token += tokens[at(rank)];
    }
  }

  [[nodiscard]] cpu::ForwardInput<S> forward_input(int rank) {
    Rank& r = *ranks_[at(rank)];
    return {
        .ffn = data_.ffn,
        .x = values_of<S>(data_.x).subspan(at(r.token * data_.hidden), at(r.tokens * data_.hidden)),
        .topk_ids = std::span<const std::int32_t>(data_.topk_ids)
                        .subspan(at(r.token * data_.topk), at(r.tokens * data_.topk)),
        .topk_weights = std::span<const float>(data_.topk_weights)
                            .subspan(at(r.token * data_.topk), at(r.tokens * data_.topk)),
        .w1 = r.w1,
        .w2 = r.w2,
        .out = r.out.span()};
  }
  [[nodiscard]] cpu::BackwardInput<S> backward_input(int rank) {
    Rank& r = *ranks_[at(rank)];
    return {.d_out = values_of<S>(*data_.d_out)
                         .subspan(at(r.token * data_.hidden), at(r.tokens * data_.hidden)),
            .w1 = r.w1,
            .w2 = r.w2,
            .d_x = r.d_x.span(),
            .d_topk_weights = r.d_topk_weights.span(),
            .d_w1 = r.d_w1.span(),
            .d_w2 = r.d_w2.span()};
  }
  void forward(cpu::RankLayer<S>& layer, int rank) {
    ranks_[at(rank)]->out.poison();
    ranks_[at(rank)]->saved.emplace(layer.forward(forward_input(rank)));
  }
  void backward(cpu::RankLayer<S>& layer, int rank) {
    Rank& r = *ranks_[at(rank)];
    r.d_x.poison();
    r.d_topk_weights.poison();
    r.d_w1.poison();
    r.d_w2.poison();
    layer.backward(*r.saved, backward_input(rank));
  }
  [[nodiscard]] const cpu::Saved<S>& saved(int rank) const { return *ranks_[at(rank)]->saved; }

  // The ranks' outputs put together as global tensors.
  [[nodiscard]] CaseResult result() {
    CaseResult all;
    const auto append = [](std::vector<std::byte>& to, std::span<const S> values) {
      const auto bytes = std::as_bytes(values);
      to.insert(to.end(), bytes.begin(), bytes.end());
    };
    const std::int64_t w = data_.ffn * data_.hidden;
    all.d_w1.resize(at(data_.num_experts * 2 * w));
    all.d_w2.resize(at(data_.num_experts * w));
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      Rank& r = *ranks_[rank];
      EXPECT_TRUE(r.out.intact() && r.d_x.intact() && r.d_topk_weights.intact() &&
                  r.d_w1.intact() && r.d_w2.intact())
          << "rank " << rank << " wrote beyond an output";
      append(all.out, r.out.span());
      append(all.d_x, r.d_x.span());
      const auto d = r.d_topk_weights.span();
      all.d_topk_weights.insert(all.d_topk_weights.end(), d.begin(), d.end());
      std::int64_t local = 0;
      for (const std::int32_t expert : placement_.experts_of[rank]) {
        std::copy_n(r.d_w1.span().data() + local * 2 * w, 2 * w, all.d_w1.data() + expert * 2 * w);
        std::copy_n(r.d_w2.span().data() + local * w, w, all.d_w2.data() + expert * w);
        ++local;
      }
    }
    return all;
  }

 private:
  struct Rank {
    Rank(const Case& data, const Placement& placement, int rank, std::int64_t first,
         std::int64_t count)
        : token(first),
          tokens(count),
          out(at(count * data.hidden)),
          d_x(at(count * data.hidden)),
          d_topk_weights(at(count * data.topk)),
          d_w1(at(placement.num_local_experts(rank) * 2 * data.ffn * data.hidden)),
          d_w2(at(placement.num_local_experts(rank) * data.ffn * data.hidden)) {
      const std::int64_t w = data.ffn * data.hidden;
      for (const std::int32_t expert : placement.experts_of[at(rank)]) {
        const auto one = values_of<S>(data.w1).subspan(at(expert * 2 * w), at(2 * w));
        const auto two = values_of<S>(data.w2).subspan(at(expert * w), at(w));
        w1.insert(w1.end(), one.begin(), one.end());
        w2.insert(w2.end(), two.begin(), two.end());
      }
    }
    std::int64_t token, tokens;
    std::vector<S> w1, w2;
    Fenced<S> out, d_x;
    Fenced<float> d_topk_weights, d_w1, d_w2;
    std::optional<cpu::Saved<S>> saved;
  };

  const Case& data_;
  const Placement& placement_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

struct RanksOptions {
  int num_ranks = 2;
  Schedule schedule = {};
  std::int64_t max_tokens = -1;  // per rank; -1 = what the case needs
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(60);
  std::function<void(const TaskInfo&)> before_task = {};
  bool trace = false;
  std::optional<Placement> placement = {};
};

// A group whose ranks live on between operations.
template <typename S>
class Ranks {
 public:
  Ranks(const Case& data, RanksOptions options) {
    const auto tokens = tokens_of_ranks(data, options.num_ranks);
    cpu::GroupConfig config;
    config.shape = {.num_ranks = options.num_ranks,
                    .num_experts = static_cast<int>(data.num_experts),
                    .topk = static_cast<int>(data.topk),
                    .hidden = data.hidden,
                    .max_tokens = options.max_tokens >= 0
                                      ? options.max_tokens
                                      : *std::max_element(tokens.begin(), tokens.end()),
                    .element_bytes = sizeof(S)};
    config.schedule = options.schedule;
    config.placement = options.placement.value_or(
        make_contiguous_placement(config.shape.num_experts, options.num_ranks));
    config.wait_bound = options.wait_bound;
    config.before_task = std::move(options.before_task);
    config.trace_capacity = options.trace ? kTraceCapacity : 0;
    group_ = std::make_unique<cpu::Group>(std::move(config));
    for (int rank = 0; rank < options.num_ranks; ++rank) {
      layers_.push_back(std::make_unique<cpu::RankLayer<S>>(*group_, rank));
    }
  }

  [[nodiscard]] int num_ranks() const { return static_cast<int>(layers_.size()); }
  [[nodiscard]] cpu::Group& group() { return *group_; }
  [[nodiscard]] const Placement& placement() const { return group_->config().placement; }
  [[nodiscard]] cpu::RankLayer<S>& layer(int rank) { return *layers_[at(rank)]; }

  struct Failure {
    ErrorCode code;
    std::string text;
  };
  // body(layer, rank) on a thread of each rank; what each ended with.
  std::vector<std::optional<Failure>> each(
      const std::function<void(cpu::RankLayer<S>&, int)>& body) {
    std::vector<std::optional<Failure>> failures(layers_.size());
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < num_ranks(); ++rank) {
        threads.emplace_back([&, rank] {
          try {
            body(layer(rank), rank);
          } catch (const Error& error) {
            failures[at(rank)] = Failure{error.code(), error.what()};
          }
        });
      }
    }
    return failures;
  }
  // The same where no rank may fail.
  void all(const std::function<void(cpu::RankLayer<S>&, int)>& body) {
    const auto failures = each(body);
    for (std::size_t rank = 0; rank < failures.size(); ++rank) {
      if (failures[rank]) ADD_FAILURE() << "rank " << rank << ": " << failures[rank]->text;
    }
  }
  CaseResult forward_backward(Step<S>& step) {
    all([&](cpu::RankLayer<S>& layer, int rank) {
      step.forward(layer, rank);
      step.backward(layer, rank);
    });
    return step.result();
  }
  void recover() {
    all([](cpu::RankLayer<S>& layer, int) { layer.recover(); });
  }

 private:
  std::unique_ptr<cpu::Group> group_;
  std::vector<std::unique_ptr<cpu::RankLayer<S>>> layers_;
};

}  // namespace uniep::test
