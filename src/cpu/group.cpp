// SPDX-License-Identifier: Apache-2.0
#include "cpu/group.hpp"

#include <new>
#include <span>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/limits.hpp"

namespace uniep::cpu {
namespace {

const GroupConfig& checked(const GroupConfig& config) {
  validate(config.schedule);
  const HeapShape& s = config.shape;
  if (s.num_ranks < 1 || s.num_ranks > kMaxRanks) {
    throw_invalid("num_ranks is {}; it must be 1 to {}", s.num_ranks, kMaxRanks);
  }
  check_num_threads(s.num_ranks, config.schedule);
  if (s.topk < 1 || s.topk > 64) throw_invalid("topk is {}; it must be 1 to 64", s.topk);
  if (s.hidden < 1) throw_invalid("hidden is {}; it must be at least 1", s.hidden);
  if (s.max_tokens < 0 || s.max_tokens > (std::int64_t{1} << 31) / s.topk - 1) {
    throw_invalid("max_tokens_per_rank is {}; it must be 0 to {} with topk = {}", s.max_tokens,
                  (std::int64_t{1} << 31) / s.topk - 1, s.topk);
  }
  if (config.placement.num_ranks != s.num_ranks ||
      config.placement.num_experts() != s.num_experts) {
    throw_invalid("the placement is for {} experts on {} ranks; the group has {} on {}",
                  config.placement.num_experts(), config.placement.num_ranks, s.num_experts,
                  s.num_ranks);
  }
  if (config.job && config.job->num_ranks != s.num_ranks) {
    throw_invalid("num_ranks is {}; the job has {} ranks", s.num_ranks, config.job->num_ranks);
  }
  return config;
}

// What all ranks of a job must have in common, in words that a person can compare.
std::string agreement_of(const GroupConfig& config) {
  const HeapShape& s = config.shape;
  std::string text = fmt::format(
      "{} experts, topk {}, hidden {}, {} tokens a rank at most, {} bytes an element, "
      "schedule {}, wait bound {} ms, {} common bytes",
      s.num_experts, s.topk, s.hidden, s.max_tokens, s.element_bytes, to_string(config.schedule),
      std::chrono::duration_cast<std::chrono::milliseconds>(config.wait_bound).count(),
      config.common_bytes);
  const auto placement = std::as_bytes(std::span(config.placement.rank_of));
  text += fmt::format(", placement {:016x}", fnv1a(placement));
  if (!config.job_agreement.empty()) text += ", " + config.job_agreement;
  return text;
}

}  // namespace

Group::Group(GroupConfig config)
    : config_(std::move(config)), layout_(checked(config_).shape, config_.schedule) {
  const int num_ranks = config_.shape.num_ranks;
  std::unique_ptr<Bootstrap> bootstrap;
  if (config_.job) {
    bootstrap =
        std::make_unique<Bootstrap>(*config_.job, agreement_of(config_), config_.wait_bound);
  }
  static_assert(sizeof(GroupState) <= SymmetricHeap::kControlBytes);
  heap_ = make_host_heap(
      {.num_ranks = num_ranks,
       .bytes_per_rank = static_cast<std::size_t>(layout_.bytes_per_rank()),
       .common_bytes = config_.common_bytes},
      [&](std::byte* control) { new (control) GroupState(num_ranks, config_.wait_bound); },
      bootstrap.get());
  state_ = std::launder(reinterpret_cast<GroupState*>(heap_->control()));
  epochs_ = std::vector<RankEpochs>(static_cast<std::size_t>(num_ranks));
  bootstrap_ = std::move(bootstrap);
  if (bootstrap_) bootstrap_->watch(*state_);
}

void check_num_threads(int num_ranks, const Schedule& schedule) {
  const int threads = num_ranks * schedule.workers;
  if (threads > kMaxThreads) {
    throw_invalid("{} ranks with {} workers each are {} threads; at most {} are served", num_ranks,
                  schedule.workers, threads, kMaxThreads);
  }
}

void check_trace_capacity(std::int64_t capacity) {
  if (capacity < 1 || capacity > kMaxTraceCapacity) {
    throw_invalid("trace_capacity is {} records; it must be 1 to {}", capacity, kMaxTraceCapacity);
  }
}

RankEpochs& Group::epochs(int rank) {
  if (rank < 0 || rank >= config_.shape.num_ranks) {
    throw_invalid("rank is {}; ranks are 0 to {}", rank, config_.shape.num_ranks - 1);
  }
  if (config_.job && rank != config_.job->rank) {
    throw_invalid("rank is {}; this process is rank {} of its job", rank, config_.job->rank);
  }
  return epochs_[static_cast<std::size_t>(rank)];
}

}  // namespace uniep::cpu
