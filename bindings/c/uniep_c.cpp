// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>

#include "base/error.hpp"
#include "uniep/layer.hpp"
#include "uniep/uniep.h"
#include "uniep/version.hpp"

struct uniep_group {
  explicit uniep_group(const uniep::GroupOptions& options) : group(options) {}
  uniep::Group group;
};

struct uniep_layer {
  uniep_layer(uniep::Group& group_of_layer, int rank_of_layer)
      : group(group_of_layer), rank(rank_of_layer), layer(group_of_layer, rank_of_layer) {}
  uniep::Group& group;
  int rank;
  uniep::Layer layer;
};

struct uniep_saved {
  uniep::Saved saved;
  std::int64_t num_tokens;
};

namespace {

thread_local std::string last_error;

// No exception crosses the interface.
uniep_status guarded(const std::function<void()>& body) {
  try {
    body();
    return UNIEP_OK;
  } catch (const uniep::Error& error) {
    last_error = error.what();
    return error.code() == uniep::ErrorCode::invalid_argument ? UNIEP_INVALID_ARGUMENT
                                                              : UNIEP_WORLD;
  } catch (const std::bad_alloc&) {
    last_error = "memory is not there for this size";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return UNIEP_WORLD;
}

template <typename T>
void require(const T* pointer, const char* name) {
  if (pointer == nullptr) uniep::throw_invalid("{} is NULL", name);
}

// The caller's struct, widened to what this library knows.
template <typename T>
T read(const T* from, const char* name, std::size_t first_size, void (*init)(T*)) {
  require(from, name);
  std::size_t size = 0;
  std::memcpy(&size, from, sizeof size);
  if (size < first_size || size > sizeof(T)) {
    uniep::throw_invalid(
        "{}.size is {}; this library knows {} to {} bytes, and the struct's init function sets it",
        name, size, first_size, sizeof(T));
  }
  T result;
  init(&result);
  std::memcpy(&result, from, size);
  return result;
}

template <typename T>
void init(T* to) {
  if (to == nullptr) return;
  *to = T{};
  to->size = sizeof(T);
}

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::int64_t element_bytes(const uniep::GroupOptions& options) {
  return options.dtype == uniep::DType::bf16 ? 2 : 4;
}

// The spans of one call: pointers with the sizes that the group and T make. NULL with elements to
// hold is refused.
struct Spans {
  const uniep::GroupOptions& options;
  std::int64_t num_tokens;
  std::int64_t num_local;

  template <typename Byte, typename Void>
  [[nodiscard]] std::span<Byte> bytes(Void* pointer, std::int64_t elements,
                                      const char* name) const {
    if (elements > 0) require(pointer, name);
    return {static_cast<Byte*>(pointer), size(elements * element_bytes(options))};
  }
  template <typename T>
  [[nodiscard]] std::span<T> of(T* pointer, std::int64_t elements, const char* name) const {
    if (elements > 0) require(pointer, name);
    return {pointer, size(elements)};
  }
  [[nodiscard]] std::int64_t rows() const { return num_tokens * options.hidden; }
  [[nodiscard]] std::int64_t choices() const { return num_tokens * options.topk; }
  [[nodiscard]] std::int64_t w2() const { return num_local * options.hidden * options.ffn; }
};

Spans spans_of(const uniep_layer& layer, std::int64_t num_tokens) {
  const uniep::GroupOptions& options = layer.group.options();
  if (num_tokens < 0 || num_tokens > options.max_tokens_per_rank) {
    uniep::throw_invalid("num_tokens is {}; it must be 0 to max_tokens_per_rank = {}", num_tokens,
                         options.max_tokens_per_rank);
  }
  return {options, num_tokens,
          static_cast<std::int64_t>(layer.group.experts_of(layer.rank).size())};
}

}  // namespace

extern "C" {

void uniep_group_options_init(uniep_group_options* options) {
  init(options);
  if (options == nullptr) return;
  options->num_ranks = 1;
  options->num_experts = 1;
  options->topk = 1;
  options->wait_bound_ms = 30000;
}

void uniep_forward_args_init(uniep_forward_args* args) { init(args); }
void uniep_backward_args_init(uniep_backward_args* args) { init(args); }

uniep_status uniep_job_from_environment(int32_t* rank, int32_t* num_ranks, char* name,
                                        size_t name_bytes) {
  return guarded([&] {
    require(rank, "rank");
    require(num_ranks, "num_ranks");
    if (name_bytes > 0) require(name, "name");
    const auto job = uniep::job_from_environment();
    *rank = job ? job->rank : 0;
    *num_ranks = job ? job->num_ranks : 0;
    if (name_bytes == 0) return;
    const std::string text = job ? job->name : "";
    const std::size_t length = std::min(text.size(), name_bytes - 1);
    std::memcpy(name, text.data(), length);
    name[length] = 0;
  });
}

uniep_status uniep_group_create(const uniep_group_options* options, uniep_group** group) {
  return guarded([&] {
    require(group, "group");
    *group = nullptr;
    const auto o = read(options, "options", sizeof(uniep_group_options), uniep_group_options_init);
    if (o.dtype != UNIEP_BF16 && o.dtype != UNIEP_F32) {
      uniep::throw_invalid("dtype is {}; it can be UNIEP_BF16 (0) or UNIEP_F32 (1)", o.dtype);
    }
    if (o.wait_bound_ms < 1) {
      uniep::throw_invalid("wait_bound_ms is {}; it must be at least 1", o.wait_bound_ms);
    }
    if (o.rank_of_expert != nullptr && o.num_experts < 1) {
      uniep::throw_invalid("num_experts is {}; it must be at least 1", o.num_experts);
    }
    uniep::GroupOptions made;
    made.num_ranks = o.num_ranks;
    made.num_experts = o.num_experts;
    made.topk = o.topk;
    made.hidden = o.hidden;
    made.ffn = o.ffn;
    made.max_tokens_per_rank = o.max_tokens_per_rank;
    made.dtype = o.dtype == UNIEP_BF16 ? uniep::DType::bf16 : uniep::DType::f32;
    if (o.schedule != nullptr) made.schedule = uniep::parse_schedule(o.schedule);
    if (o.rank_of_expert != nullptr) {
      made.rank_of_expert.assign(o.rank_of_expert, o.rank_of_expert + o.num_experts);
    }
    made.wait_bound = std::chrono::milliseconds(o.wait_bound_ms);
    if (o.job_name != nullptr) made.job = uniep::Job{o.job_name, o.job_rank, o.num_ranks};
    *group = std::make_unique<uniep_group>(made).release();
  });
}

void uniep_group_destroy(uniep_group* group) { delete group; }

uniep_status uniep_group_local_experts(const uniep_group* group, int32_t rank,
                                       int32_t* num_local_experts, int32_t* ids) {
  return guarded([&] {
    require(group, "group");
    require(num_local_experts, "num_local_experts");
    const auto experts = group->group.experts_of(rank);
    *num_local_experts = static_cast<int32_t>(experts.size());
    if (ids != nullptr) std::copy(experts.begin(), experts.end(), ids);
  });
}

uniep_status uniep_layer_create(uniep_group* group, int32_t rank, uniep_layer** layer) {
  return guarded([&] {
    require(layer, "layer");
    *layer = nullptr;
    require(group, "group");
    *layer = std::make_unique<uniep_layer>(group->group, rank).release();
  });
}

void uniep_layer_destroy(uniep_layer* layer) { delete layer; }

uniep_status uniep_layer_forward(uniep_layer* layer, const uniep_forward_args* args,
                                 uniep_saved** saved) {
  if (saved != nullptr) *saved = nullptr;
  return guarded([&] {
    require(layer, "layer");
    std::optional<uniep::ForwardArgs> call;
    std::int64_t num_tokens = 0;
    // A call that cannot be made must end the peers' as well.
    layer->layer.prepare([&] {
      const auto a = read(args, "args", sizeof(uniep_forward_args), uniep_forward_args_init);
      const Spans s = spans_of(*layer, a.num_tokens);
      num_tokens = a.num_tokens;
      call.emplace(
          uniep::ForwardArgs{.x = s.bytes<const std::byte>(a.x, s.rows(), "x"),
                             .topk_ids = s.of(a.topk_ids, s.choices(), "topk_ids"),
                             .topk_weights = s.of(a.topk_weights, s.choices(), "topk_weights"),
                             .w1 = s.bytes<const std::byte>(a.w1, 2 * s.w2(), "w1"),
                             .w2 = s.bytes<const std::byte>(a.w2, s.w2(), "w2"),
                             .out = s.bytes<std::byte>(a.out, s.rows(), "out")});
    });
    uniep::Saved kept = layer->layer.forward(*call);
    if (saved != nullptr) *saved = new uniep_saved{std::move(kept), num_tokens};
  });
}

uniep_status uniep_layer_backward(uniep_layer* layer, const uniep_saved* saved,
                                  const uniep_backward_args* args) {
  return guarded([&] {
    require(layer, "layer");
    std::optional<uniep::BackwardArgs> call;
    layer->layer.prepare([&] {
      require(saved, "saved");
      const auto a = read(args, "args", sizeof(uniep_backward_args), uniep_backward_args_init);
      const Spans s = spans_of(*layer, saved->num_tokens);
      call.emplace(uniep::BackwardArgs{
          .d_out = s.bytes<const std::byte>(a.d_out, s.rows(), "d_out"),
          .w1 = s.bytes<const std::byte>(a.w1, 2 * s.w2(), "w1"),
          .w2 = s.bytes<const std::byte>(a.w2, s.w2(), "w2"),
          .d_x = s.bytes<std::byte>(a.d_x, s.rows(), "d_x"),
          .d_topk_weights = s.of(a.d_topk_weights, s.choices(), "d_topk_weights"),
          .d_w1 = s.of(a.d_w1, 2 * s.w2(), "d_w1"),
          .d_w2 = s.of(a.d_w2, s.w2(), "d_w2"),
          .accumulate = a.accumulate != 0});
    });
    layer->layer.backward(saved->saved, *call);
  });
}

void uniep_saved_destroy(uniep_saved* saved) { delete saved; }

uniep_status uniep_layer_recover(uniep_layer* layer) {
  return guarded([&] {
    require(layer, "layer");
    layer->layer.recover();
  });
}

const char* uniep_last_error(void) { return last_error.c_str(); }

const char* uniep_version(void) { return uniep::library_version(); }

}  // extern "C"
