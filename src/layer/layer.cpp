// SPDX-License-Identifier: Apache-2.0
// The public layer over cpu::RankLayer: one class for both dtypes, byte spans in, checked once.
#include "uniep/layer.hpp"

#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "base/error.hpp"
#include "cpu/group.hpp"
#include "cpu/rank_layer.hpp"

namespace uniep {
namespace {

template <typename S, typename Byte>
auto typed(std::span<Byte> bytes, std::string_view name) {
  using T = std::conditional_t<std::is_const_v<Byte>, const S, S>;
  if (bytes.size() % sizeof(S) != 0) {
    throw_invalid("{} has {} bytes, which is no whole number of elements of {} bytes", name,
                  bytes.size(), sizeof(S));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (address % alignof(S) != 0) {
    throw_invalid("{} begins at address {:#x}; it must be a multiple of {}", name, address,
                  alignof(S));
  }
  return std::span<T>(reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(S));
}

cpu::GroupConfig config_of(const GroupOptions& options) {
  if (options.dtype != DType::bf16 && options.dtype != DType::f32) {
    throw_invalid("dtype must be bf16 or f32");
  }
  cpu::GroupConfig config;
  config.shape = {.num_ranks = options.num_ranks,
                  .num_experts = options.num_experts,
                  .topk = options.topk,
                  .hidden = options.hidden,
                  .max_tokens = options.max_tokens_per_rank,
                  .element_bytes = options.dtype == DType::bf16 ? 2 : 4};
  config.schedule = options.schedule;
  if (options.ffn < 1) throw_invalid("ffn is {}; it must be at least 1", options.ffn);
  if (options.rank_of_expert.empty()) {
    config.placement = make_contiguous_placement(options.num_experts, options.num_ranks);
  } else {
    config.placement = make_placement(options.rank_of_expert, options.num_ranks);
  }
  config.wait_bound = options.wait_bound;
  config.trace_capacity = options.trace ? options.trace_capacity : 0;
  if (options.trace) cpu::check_trace_capacity(options.trace_capacity);
  config.job = options.job;
  config.job_agreement = fmt::format("ffn {}", options.ffn);
  return config;
}

}  // namespace

struct Group::State {
  explicit State(const GroupOptions& group_options)
      : options(group_options), group(config_of(group_options)) {}
  GroupOptions options;
  cpu::Group group;
};

Group::Group(const GroupOptions& options) : state_(std::make_unique<State>(options)) {}
Group::~Group() = default;

const GroupOptions& Group::options() const { return state_->options; }

std::vector<std::int32_t> Group::experts_of(int rank) const {
  const Placement& placement = state_->group.config().placement;
  if (rank < 0 || rank >= placement.num_ranks) {
    throw_invalid("rank is {}; it must be 0 to {}", rank, placement.num_ranks - 1);
  }
  return placement.experts_of[static_cast<std::size_t>(rank)];
}

std::int64_t Group::heap_bytes_per_rank() const { return state_->group.layout().bytes_per_rank(); }

struct Saved::State {
  std::variant<cpu::Saved<float>, cpu::Saved<Bf16>> saved;
};

Saved::Saved(std::unique_ptr<State> state) : state_(std::move(state)) {}
Saved::Saved(Saved&&) noexcept = default;
Saved& Saved::operator=(Saved&&) noexcept = default;
Saved::~Saved() = default;

struct Layer::State {
  State(const GroupOptions& group_options, cpu::Group& cpu_group, int rank_of_layer)
      : options(group_options), group(cpu_group), rank(rank_of_layer) {
    if (options.dtype == DType::bf16) {
      layer.emplace<cpu::RankLayer<Bf16>>(group, rank);
    } else {
      layer.emplace<cpu::RankLayer<float>>(group, rank);
    }
  }

  // Calls visitor(layer, S{}). Whatever it throws ends the operation on every rank, also where the
  // arguments never reached the layer.
  template <typename Visitor>
  decltype(auto) operate(Visitor visitor) {
    try {
      return visit(visitor);
    } catch (const std::exception& error) {
      abort_group(group.state(), rank, error.what());
      throw;
    }
  }

  template <typename Visitor>
  decltype(auto) visit(Visitor visitor) {
    if (auto* narrow = std::get_if<cpu::RankLayer<Bf16>>(&layer)) return visitor(*narrow, Bf16{});
    return visitor(std::get<cpu::RankLayer<float>>(layer), float{});
  }

  const GroupOptions& options;
  cpu::Group& group;
  int rank;
  std::variant<std::monostate, cpu::RankLayer<float>, cpu::RankLayer<Bf16>> layer;
};

Layer::Layer(Group& group, int rank)
    : state_(std::make_unique<State>(group.options(), group.state_->group, rank)) {}
Layer::~Layer() = default;

Saved Layer::forward(const ForwardArgs& args) {
  return state_->operate([&]<typename S>(cpu::RankLayer<S>& layer, S) {
    const cpu::ForwardInput<S> input{.ffn = state_->options.ffn,
                                     .x = typed<S>(args.x, "x"),
                                     .topk_ids = args.topk_ids,
                                     .topk_weights = args.topk_weights,
                                     .w1 = typed<S>(args.w1, "w1"),
                                     .w2 = typed<S>(args.w2, "w2"),
                                     .out = typed<S>(args.out, "out")};
    auto state = std::make_unique<Saved::State>();
    state->saved = layer.forward(input);
    return Saved(std::move(state));
  });
}

void Layer::backward(const Saved& saved, const BackwardArgs& args) {
  state_->operate([&]<typename S>(cpu::RankLayer<S>& layer, S) {
    const auto* kept = saved.state_ ? std::get_if<cpu::Saved<S>>(&saved.state_->saved) : nullptr;
    if (kept == nullptr) {
      throw_invalid("saved is not from a forward of this layer: it is empty or of another dtype");
    }
    layer.backward(*kept, {.d_out = typed<S>(args.d_out, "d_out"),
                           .w1 = typed<S>(args.w1, "w1"),
                           .w2 = typed<S>(args.w2, "w2"),
                           .d_x = typed<S>(args.d_x, "d_x"),
                           .d_topk_weights = args.d_topk_weights,
                           .d_w1 = args.d_w1,
                           .d_w2 = args.d_w2,
                           .accumulate = args.accumulate});
  });
}

void Layer::prepare(const std::function<void()>& body) {
  state_->operate([&]<typename S>(cpu::RankLayer<S>&, S) { body(); });
}

void Layer::recover() {
  state_->visit([]<typename S>(cpu::RankLayer<S>& layer, S) { layer.recover(); });
}

Trace Layer::trace() const {
  return state_->visit([]<typename S>(cpu::RankLayer<S>& layer, S) { return layer.trace(); });
}

}  // namespace uniep
