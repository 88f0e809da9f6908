// SPDX-License-Identifier: Apache-2.0
#include "cpu/group.hpp"

#include <new>

#include "base/error.hpp"

namespace uniep::cpu {
namespace {

const GroupConfig& checked(const GroupConfig& config) {
  validate(config.schedule);
  const HeapShape& s = config.shape;
  if (s.num_ranks < 1 || s.num_ranks > 1024) {
    throw_invalid("num_ranks is {}; it must be 1 to 1024", s.num_ranks);
  }
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
  return config;
}

}  // namespace

Group::Group(GroupConfig config)
    : config_(std::move(config)), layout_(checked(config_).shape, config_.schedule) {
  heap_ =
      make_host_heap(config_.shape.num_ranks, static_cast<std::size_t>(layout_.bytes_per_rank()));
  static_assert(sizeof(GroupState) <= SymmetricHeap::kControlBytes);
  state_ = new (heap_->control()) GroupState(config_.shape.num_ranks, config_.wait_bound);
  epochs_ = std::vector<RankEpochs>(static_cast<std::size_t>(config_.shape.num_ranks));
}

RankEpochs& Group::epochs(int rank) {
  if (rank < 0 || rank >= config_.shape.num_ranks) {
    throw_invalid("rank is {}; ranks are 0 to {}", rank, config_.shape.num_ranks - 1);
  }
  return epochs_[static_cast<std::size_t>(rank)];
}

}  // namespace uniep::cpu
