// SPDX-License-Identifier: Apache-2.0
#include "cpu/group.hpp"

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

const char* to_string(Role role) {
  switch (role) {
    case Role::send:
      return "send";
    case Role::pull:
      return "pull";
    case Role::fanout:
      return "fanout";
    case Role::gemm1:
      return "gemm1";
    case Role::activation:
      return "activation";
    case Role::gemm2:
      return "gemm2";
    case Role::dgrad2:
      return "dgrad2";
    case Role::d_activation:
      return "d_activation";
    case Role::dgrad1:
      return "dgrad1";
    case Role::wgrad2:
      return "wgrad2";
    case Role::wgrad1:
      return "wgrad1";
    case Role::reduce:
      return "reduce";
  }
  return "unknown";
}

Group::Group(GroupConfig config)
    : config_(std::move(config)), layout_(checked(config_).shape, config_.schedule) {
  heap_ = make_host_heap(config_.shape.num_ranks,
                         static_cast<std::size_t>(layout_.bytes_per_rank()));
  state_ = std::make_unique<GroupState>(config_.shape.num_ranks, config_.wait_bound);
}

}  // namespace uniep::cpu
