// SPDX-License-Identifier: Apache-2.0
#include "layer/run_case.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <system_error>
#include <thread>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "cpu/rank_layer.hpp"
#include "cpu/sequential.hpp"
#include "io/tensor_file.hpp"
#include "layer/rank_processes.hpp"

namespace uniep {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <typename S>
std::span<const S> view(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const S*>(bytes.data()), bytes.size() / sizeof(S)};
}
template <typename S>
std::span<S> view(std::vector<std::byte>& bytes) {
  return {reinterpret_cast<S*>(bytes.data()), bytes.size() / sizeof(S)};
}

void check_backward(const Case& data, bool backward) {
  if (backward && !data.d_out) {
    throw_invalid("the case has no d_out, which a backward pass needs");
  }
}

template <typename S>
cpu::SequentialInput<S> sequential_input(const Case& data, std::span<const S> x,
                                         std::span<const S> w1, std::span<const S> w2,
                                         std::span<const S> d_out, bool backward) {
  return {.num_tokens = data.num_tokens,
          .hidden = data.hidden,
          .ffn = data.ffn,
          .num_experts = static_cast<std::int32_t>(data.num_experts),
          .topk = static_cast<std::int32_t>(data.topk),
          .topk_ids = data.topk_ids,
          .topk_weights = data.topk_weights,
          .x = x,
          .w1 = w1,
          .w2 = w2,
          .d_out = d_out,
          .backward = backward};
}

template <typename S>
CaseResult run_sequential_as(const Case& data, bool backward) {
  auto result = cpu::run_sequential(
      sequential_input<S>(data, view<S>(data.x), view<S>(data.w1), view<S>(data.w2),
                          backward ? view<S>(*data.d_out) : std::span<const S>{}, backward));
  const auto bytes = [](const std::vector<S>& values) {
    const auto raw = std::as_bytes(std::span(values));
    return std::vector<std::byte>(raw.begin(), raw.end());
  };
  return {.out = bytes(result.out),
          .d_x = bytes(result.d_x),
          .d_topk_weights = std::move(result.d_topk_weights),
          .d_w1 = std::move(result.d_w1),
          .d_w2 = std::move(result.d_w2)};
}

// Where the ranks write. d_w1 and d_w2 of all ranks are one tensor each, as out and d_x are.
template <typename S>
struct ResultSpans {
  std::span<S> out, d_x;
  std::span<float> d_topk_weights, d_w1, d_w2;
};

// What one rank works on.
template <typename S>
struct RankSlice {
  cpu::ForwardInput<S> forward;
  cpu::BackwardInput<S> backward;
};

template <typename S>
RankSlice<S> slice_of(const Case& data, const RunOptions& options, const ResultSpans<S>& result,
                      std::int64_t token, std::int64_t tokens, std::int64_t expert,
                      std::int64_t experts) {
  const std::int64_t w = data.ffn * data.hidden;
  const auto tokens_by = [&](auto span, std::int64_t width) {
    return span.subspan(size(token * width), size(tokens * width));
  };
  const auto experts_by = [&](auto span, std::int64_t width) {
    return span.subspan(size(expert * width), size(experts * width));
  };
  RankSlice<S> slice;
  slice.forward = {.ffn = data.ffn,
                   .x = tokens_by(view<S>(data.x), data.hidden),
                   .topk_ids = tokens_by(std::span<const std::int32_t>(data.topk_ids), data.topk),
                   .topk_weights = tokens_by(std::span<const float>(data.topk_weights), data.topk),
                   .w1 = experts_by(view<S>(data.w1), 2 * w),
                   .w2 = experts_by(view<S>(data.w2), w),
                   .out = tokens_by(result.out, data.hidden)};
  if (!options.backward) return slice;
  slice.backward = {.d_out = tokens_by(view<S>(*data.d_out), data.hidden),
                    .w1 = slice.forward.w1,
                    .w2 = slice.forward.w2,
                    .d_x = tokens_by(result.d_x, data.hidden),
                    .d_topk_weights = tokens_by(result.d_topk_weights, data.topk),
                    .d_w1 = experts_by(result.d_w1, 2 * w),
                    .d_w2 = experts_by(result.d_w2, w)};
  return slice;
}

cpu::GroupConfig config_of(const Case& data, const RunOptions& options) {
  const std::vector<std::int64_t> tokens = tokens_of_ranks(data, options.num_ranks);
  cpu::GroupConfig config;
  config.shape = {.num_ranks = options.num_ranks,
                  .num_experts = static_cast<int>(data.num_experts),
                  .topk = static_cast<int>(data.topk),
                  .hidden = data.hidden,
                  .max_tokens = *std::max_element(tokens.begin(), tokens.end()),
                  .element_bytes = static_cast<int>(dtype_bytes(data.dtype))};
  config.schedule = options.schedule;
  config.placement = make_contiguous_placement(config.shape.num_experts, options.num_ranks);
  config.wait_bound = options.wait_bound;
  config.before_task = options.before_task;
  if (options.trace != nullptr) {
    cpu::check_trace_capacity(options.trace_capacity);
    config.trace_capacity = options.trace_capacity;
  }
  config.job = options.job;
  return config;
}

double result_bytes(const Case& data, const RunOptions& options) {
  const auto rows = static_cast<double>(data.x.size());
  if (!options.backward) return rows;
  return 2 * rows + 4 * static_cast<double>(data.topk_ids.size()) +
         12 * static_cast<double>(data.num_experts) * static_cast<double>(data.hidden) *
             static_cast<double>(data.ffn);
}

// What ranks keep of their rows (every expert is padded by up to 63 of them), and every rank's
// table of counts: x, h and a; for a backward d_out and d_h, and d_a where a split schedule stores
// it.
double private_bytes(const Case& data, const RunOptions& options) {
  const auto element = static_cast<double>(dtype_bytes(data.dtype));
  const auto hidden = static_cast<double>(data.hidden);
  const auto ffn = static_cast<double>(data.ffn);
  const auto experts = static_cast<double>(data.num_experts);
  const auto ranks = static_cast<double>(options.num_ranks);
  const double rows =
      static_cast<double>(data.num_tokens) * static_cast<double>(data.topk) + 63 * experts;
  double bytes = element * rows * (hidden + 3 * ffn) + 24 * rows + 16 * ranks * ranks * experts;
  if (options.backward) {
    bytes += element * rows * (hidden + 3 * ffn);
    if (options.schedule.fusion == Fusion::split) bytes += 4 * rows * ffn;
  }
  if (options.trace != nullptr) {
    bytes += static_cast<double>(options.trace_capacity) * sizeof(TraceEvent) * ranks *
             options.schedule.workers;
  }
  return bytes;
}

void append(Trace& to, const Trace& trace) {
  to.events.insert(to.events.end(), trace.events.begin(), trace.events.end());
  to.dropped += trace.dropped;
}

// Each rank in a thread; what they recorded is appended to `trace` in any case.
void run_rank_threads(GroupState& state, const RankBody& body, Trace& trace) {
  const int num_ranks = state.num_ranks;
  std::vector<Trace> traces(size(num_ranks));
  std::vector<std::exception_ptr> errors(size(num_ranks));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      try {
        ranks.emplace_back([&, rank] {
          try {
            body(rank, traces[size(rank)]);
          } catch (...) {
            errors[size(rank)] = std::current_exception();
          }
        });
      } catch (const std::system_error& error) {
        const std::string text =
            fmt::format("the system refused a thread for rank {} of {}: {}; use fewer ranks", rank,
                        num_ranks, error.code().message());
        abort_group(state, rank, text);
        throw_world("{}", text);
      }
    }
  }
  for (const Trace& of_rank : traces) append(trace, of_rank);
  // The cause, of the rank that failed first; its peers' errors are consequences of another kind.
  const std::uint64_t failed = state.abort_word.load();
  if (failed > 0 && errors[failed - 1]) std::rethrow_exception(errors[failed - 1]);
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

constexpr std::size_t kLine = 64;

// This process's rank; rank 0 returns when all ranks are done. The trace is this rank's alone.
void run_rank_of_job(cpu::Group& group, const Job& job, const RankBody& body, Trace& trace) {
  try {
    body(job.rank, trace);
  } catch (const std::exception& error) {
    abort_group(group.state(), job.rank, error.what());
    throw;
  }
  // Counted up by every rank after its last write, awaited by rank 0; all results become visible.
  auto* done = reinterpret_cast<std::uint64_t*>(group.common());
  std::atomic_ref<std::uint64_t>(*done).fetch_add(1, std::memory_order_acq_rel);
  if (job.rank == 0) {
    wait_at_least(group.state(), done, static_cast<std::uint64_t>(job.num_ranks),
                  {.rank = 0, .stage = "results", .role = "main"});
  }
}

template <typename S>
CaseResult run_as(const Case& data, const RunOptions& options) {
  const std::vector<std::int64_t> tokens = tokens_of_ranks(data, options.num_ranks);
  require_memory(result_bytes(data, options) + private_bytes(data, options),
                 fmt::format("the run on {} ranks", options.num_ranks));
  cpu::GroupConfig config = config_of(data, options);

  const std::size_t row_bytes = data.x.size();
  const std::size_t num_choices = options.backward ? size(data.num_tokens * data.topk) : 0;
  const std::size_t num_w1 = options.backward ? data.w1.size() / sizeof(S) : 0;
  const std::size_t num_w2 = options.backward ? data.w2.size() / sizeof(S) : 0;
  // Processes write where all can see it, in this order after a line for the count of those that
  // are done: out, d_x, d_topk_weights, d_w1, d_w2.
  const bool shared = options.processes || options.job;
  const std::size_t aligned_rows = (row_bytes + 63) / 64 * 64;
  if (shared) {
    config.common_bytes =
        kLine + 2 * aligned_rows + (num_choices + num_w1 + num_w2) * sizeof(float);
    config.job_agreement =
        fmt::format("{} tokens, ffn {}, {} repeats, backward {}", data.num_tokens, data.ffn,
                    options.repeats, options.backward);
  }
  cpu::Group group(std::move(config));
  CaseResult result;
  ResultSpans<S> spans;
  if (shared) {
    const std::size_t num_rows = row_bytes / sizeof(S);
    auto* base = group.common() + kLine;
    auto* floats = reinterpret_cast<float*>(base + 2 * aligned_rows);
    spans = {.out = {reinterpret_cast<S*>(base), num_rows},
             .d_x = {reinterpret_cast<S*>(base + aligned_rows), options.backward ? num_rows : 0},
             .d_topk_weights = {floats, num_choices},
             .d_w1 = {floats + num_choices, num_w1},
             .d_w2 = {floats + num_choices + num_w1, num_w2}};
  } else {
    result.out.resize(row_bytes);
    result.d_x.resize(options.backward ? row_bytes : 0);
    result.d_topk_weights.resize(num_choices);
    result.d_w1.resize(num_w1);
    result.d_w2.resize(num_w2);
    spans = {.out = view<S>(result.out),
             .d_x = view<S>(result.d_x),
             .d_topk_weights = result.d_topk_weights,
             .d_w1 = result.d_w1,
             .d_w2 = result.d_w2};
  }

  const auto run_rank = [&](int rank, Trace& trace) {
    const std::int64_t token =
        std::accumulate(tokens.begin(), tokens.begin() + rank, std::int64_t{0});
    const auto slice = slice_of<S>(data, options, spans, token, tokens[size(rank)],
                                   share_start(data.num_experts, options.num_ranks, rank),
                                   share_size(data.num_experts, options.num_ranks, rank));
    cpu::RankLayer<S> layer(group, rank);
    // An operation that fails is recorded too.
    const auto recorded = [&](const auto& operation) {
      try {
        return operation();
      } catch (...) {
        append(trace, layer.trace());
        throw;
      }
    };
    for (int repeat = 0; repeat < options.repeats; ++repeat) {
      trace = {};
      const auto saved = recorded([&] { return layer.forward(slice.forward); });
      append(trace, layer.trace());
      if (!options.backward) continue;
      recorded([&] { layer.backward(saved, slice.backward); });
      append(trace, layer.trace());
    }
  };
  Trace not_asked;
  Trace& trace = options.trace != nullptr ? *options.trace : not_asked;
  trace = {};
  if (options.job) {
    run_rank_of_job(group, *options.job, run_rank, trace);
    if (options.job->rank > 0) return result;
  } else if (options.processes) {
    run_rank_processes(group.state(), run_rank, trace);
  } else {
    run_rank_threads(group.state(), run_rank, trace);
    return result;
  }
  const auto bytes_of = [](std::span<const S> values) {
    const auto raw = std::as_bytes(values);
    return std::vector<std::byte>(raw.begin(), raw.end());
  };
  const auto floats_of = [](std::span<const float> values) {
    return std::vector<float>(values.begin(), values.end());
  };
  result.out = bytes_of(spans.out);
  result.d_x = bytes_of(spans.d_x);
  result.d_topk_weights = floats_of(spans.d_topk_weights);
  result.d_w1 = floats_of(spans.d_w1);
  result.d_w2 = floats_of(spans.d_w2);
  return result;
}

// About what the sequential path takes beside its case, with accumulators of `width` bytes.
double sequential_bytes(const Case& data, bool backward, double width) {
  const auto tokens = static_cast<double>(data.num_tokens);
  const double weights = 3 * static_cast<double>(data.num_experts) *
                         static_cast<double>(data.hidden) * static_cast<double>(data.ffn);
  const double rows = tokens * static_cast<double>(data.topk) * static_cast<double>(data.hidden);
  return width * (backward ? 2 : 1) *
         (weights + 2 * tokens * static_cast<double>(data.hidden) + rows);
}

std::vector<double> widen_all(const Case& data, const std::vector<std::byte>& bytes) {
  std::vector<double> values;
  if (data.dtype == DType::bf16) {
    for (const Bf16 value : view<Bf16>(bytes)) values.push_back(to_float(value));
  } else {
    for (const float value : view<float>(bytes)) values.push_back(value);
  }
  return values;
}

}  // namespace

std::vector<std::int64_t> tokens_of_ranks(const Case& data, int num_ranks) {
  if (num_ranks < 1 || num_ranks > kMaxRanks) {
    throw_invalid("ranks is {}; it must be 1 to {}", num_ranks, kMaxRanks);
  }
  if (static_cast<int>(data.tokens_per_rank.size()) == num_ranks) return data.tokens_per_rank;
  std::vector<std::int64_t> tokens;
  for (int rank = 0; rank < num_ranks; ++rank) {
    tokens.push_back(share_size(data.num_tokens, num_ranks, rank));
  }
  return tokens;
}

RunMemory memory_of_run(const Case& data, const RunOptions& options) {
  const cpu::GroupConfig config = config_of(data, options);
  const HeapLayout layout(config.shape, config.schedule);
  double tensors = static_cast<double>(data.x.size() + data.w1.size() + data.w2.size()) +
                   8 * static_cast<double>(data.topk_ids.size()) + result_bytes(data, options);
  if (options.backward) tensors += static_cast<double>(data.d_out->size());
  return {
      .tensors = tensors,
      .buffers = private_bytes(data, options) + static_cast<double>(options.num_ranks) *
                                                    static_cast<double>(layout.bytes_per_rank())};
}

CaseResult run_case(const Case& data, const RunOptions& options) {
  check_backward(data, options.backward);
  if (options.job && options.processes) {
    throw_invalid("processes and job exclude each other: a job's ranks are processes already");
  }
  return data.dtype == DType::bf16 ? run_as<Bf16>(data, options) : run_as<float>(data, options);
}

CaseResult run_case_sequential(const Case& data, bool backward) {
  check_backward(data, backward);
  require_memory(sequential_bytes(data, backward, 4), "the sequential path");
  return data.dtype == DType::bf16 ? run_sequential_as<Bf16>(data, backward)
                                   : run_sequential_as<float>(data, backward);
}

ReferenceResult run_case_f64(const Case& data, bool backward) {
  check_backward(data, backward);
  require_memory(2 * sequential_bytes(data, backward, 8), "the path in f64");
  const auto x = widen_all(data, data.x);
  const auto w1 = widen_all(data, data.w1);
  const auto w2 = widen_all(data, data.w2);
  const auto d_out = backward ? widen_all(data, *data.d_out) : std::vector<double>{};
  auto result = cpu::run_sequential(sequential_input<double>(data, x, w1, w2, d_out, backward));
  return {.out = std::move(result.out),
          .d_x = std::move(result.d_x),
          .d_topk_weights = std::move(result.d_topk_weights),
          .d_w1 = std::move(result.d_w1),
          .d_w2 = std::move(result.d_w2)};
}

}  // namespace uniep
