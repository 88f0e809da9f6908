// SPDX-License-Identifier: Apache-2.0
#include "layer/cuda/run_processes.hpp"

#include <algorithm>
#include <atomic>
#include <new>
#include <optional>
#include <random>
#include <utility>

#include "base/error.hpp"
#include "layer/rank_processes.hpp"
#include "layer/run_case.hpp"
#include "memory/bootstrap.hpp"
#include "memory/shared_memory.hpp"
#include "memory/wait.hpp"

namespace uniep {
namespace {

constexpr std::size_t kLine = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::size_t element_bytes(const Case& data) { return data.dtype == DType::bf16 ? 2 : 4; }

// At the start of the host's memory that all ranks share; results follow.
struct Common {
  Common(int ranks, std::chrono::nanoseconds bound) : state(ranks, bound) {}
  GroupState state;
  // Written by each rank in its place before a barrier, read by all after it.
  std::uint64_t values[cuda::kMaxDeviceRanks] = {};
  // Counted up by every rank after its last write, awaited by rank 0 of a job; results become
  // visible.
  std::uint64_t done = 0;
};

struct Results {
  std::size_t rows, choices, w1, w2;  // bytes of out or d_x; elements

  Results(const Case& data, bool backward)
      : rows(data.x.size()),
        choices(backward ? data.topk_ids.size() : 0),
        w1(backward ? data.w1.size() / element_bytes(data) : 0),
        w2(backward ? data.w2.size() / element_bytes(data) : 0) {}

  [[nodiscard]] std::size_t bytes() const {
    return aligned(sizeof(Common)) + 2 * aligned(rows) + (choices + w1 + w2) * sizeof(float);
  }
  [[nodiscard]] CaseSpans in(std::byte* memory, bool backward) const {
    std::byte* const base = memory + aligned(sizeof(Common));
    auto* const floats = reinterpret_cast<float*>(base + 2 * aligned(rows));
    return {.out = {base, rows},
            .d_x = {base + aligned(rows), backward ? rows : 0},
            .d_topk_weights = {floats, choices},
            .d_w1 = {floats + choices, w1},
            .d_w2 = {floats + choices + w1, w2}};
  }
};

CaseResult copy_of(const CaseSpans& spans) {
  const auto copy = [](auto span) { return std::vector(span.begin(), span.end()); };
  return {.out = copy(spans.out),
          .d_x = copy(spans.d_x),
          .d_topk_weights = copy(spans.d_topk_weights),
          .d_w1 = copy(spans.d_w1),
          .d_w2 = copy(spans.d_w2)};
}

cuda::RankProcess process_of(Bootstrap& bootstrap, Common& common, int rank) {
  GroupState& state = common.state;
  return {.rank = rank,
          .num_ranks = state.num_ranks,
          .exchange = [&bootstrap](const Descriptor& own) { return bootstrap.exchange(own); },
          .largest =
              [&common, &state, rank](std::uint64_t value) {
                // A barrier's acquire and release make the values visible.
                common.values[rank] = value;
                static_cast<void>(recover(state, rank));
                const std::uint64_t most =
                    *std::max_element(common.values, common.values + state.num_ranks);
                static_cast<void>(recover(state, rank));
                return most;
              },
          .recover = [&state, rank] { static_cast<void>(recover(state, rank)); },
          .failure = [&state] { return failure_of(state); }};
}

void choose_gpu(int rank) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) error = cudaSetDevice(rank % count);
  if (error != cudaSuccess || count == 0) {
    throw_world("rank {} has no GPU: {}", rank,
                error == cudaSuccess ? "no device" : cudaGetErrorString(error));
  }
}

// The work of one rank in its process. `watch` begins once the ranks have each other's memory.
void run_rank(const Case& data, const CudaRunOptions& options, int rank, Bootstrap& bootstrap,
              Common& common, const CaseSpans& results, bool watch) {
  choose_gpu(rank);
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), options.num_ranks);
  const cuda::LayerShape shape = layer_shape_of(data, options.num_ranks, options.gemm);
  const cuda::SymmetricMemory memory(
      process_of(bootstrap, common, rank),
      cuda::SplitLayer::bytes_per_rank(shape, options.schedule, placement), options.wait_bound);
  if (watch) bootstrap.watch(common.state);
  cuda::SplitLayer layer(memory, shape, options.schedule, placement, rank, 1);
  const CaseTensors tensors(data, placement, options.backward, cuda::RankRange{rank, 1});
  for (int i = 0; i < options.repeats; ++i) {
    cuda::SplitLayer::Saved saved = layer.forward(tensors.forward(), nullptr);
    if (options.backward) layer.backward(saved, tensors.backward(), nullptr);
    layer.check(saved, nullptr);
    layer.release(std::move(saved));
  }
  tensors.download(results);
}

CaseResult run_forked(const Case& data, const CudaRunOptions& options) {
  const Results results(data, options.backward);
  SharedMemory memory(results.bytes());
  auto* const common = new (memory.data()) Common(options.num_ranks, options.wait_bound);
  const CaseSpans spans = results.in(memory.data(), options.backward);
  std::random_device random;
  const std::string name = fmt::format("forked {:08x}{:08x}{:08x}", random(), random(), random());
  Trace none;
  run_rank_processes(
      common->state,
      [&](int rank, Trace&) {
        Bootstrap bootstrap({.name = name, .rank = rank, .num_ranks = options.num_ranks}, "",
                            options.wait_bound);
        run_rank(data, options, rank, bootstrap, *common, spans, false);
      },
      none);
  return copy_of(spans);
}

CaseResult run_rank_of_job(const Case& data, const CudaRunOptions& options) {
  const Job& job = *options.job;
  if (job.num_ranks != options.num_ranks) {
    throw_invalid("the job has {} ranks and the run {}; they must agree", job.num_ranks,
                  options.num_ranks);
  }
  const Results results(data, options.backward);
  const cuda::SplitSchedule& s = options.schedule;
  const std::vector<std::int64_t> tokens = tokens_of_ranks(data, options.num_ranks);
  const std::string agreement = fmt::format(
      "GPU, {} tokens, at most {} a rank, {} experts, top {}, hidden {}, ffn {}, dtype {}, gemm "
      "{}, "
      "fusion {}, payload {}, dispatch {}, combine {}, {} blocks, {} push warps, chunk {}, {} "
      "repeats, backward {}",
      data.num_tokens, *std::max_element(tokens.begin(), tokens.end()), data.num_experts, data.topk,
      data.hidden, data.ffn, static_cast<int>(data.dtype), static_cast<int>(options.gemm),
      static_cast<int>(s.fusion), static_cast<int>(s.payload), static_cast<int>(s.dispatch),
      static_cast<int>(s.combine), s.blocks_per_rank, s.push_warps, s.chunk, options.repeats,
      options.backward);
  Bootstrap bootstrap(job, agreement, options.wait_bound);
  const auto fill = [&](std::byte* memory) {
    new (memory) Common(options.num_ranks, options.wait_bound);
  };
  std::optional<SharedMemory> memory;
  if (job.num_ranks == 1) {
    memory.emplace(results.bytes());
    fill(memory->data());
  } else {
    memory.emplace(bootstrap.share(results.bytes(), fill));
  }
  Common& common = *std::launder(reinterpret_cast<Common*>(memory->data()));
  const CaseSpans spans = results.in(memory->data(), options.backward);
  try {
    run_rank(data, options, job.rank, bootstrap, common, spans, true);
  } catch (const std::exception& error) {
    abort_group(common.state, job.rank, error.what());
    throw;
  }
  std::atomic_ref<std::uint64_t>(common.done).fetch_add(1, std::memory_order_acq_rel);
  if (job.rank > 0) return {};
  wait_at_least(common.state, &common.done, static_cast<std::uint64_t>(job.num_ranks),
                {.rank = 0, .stage = "results", .role = "main"});
  return copy_of(spans);
}

}  // namespace

CaseResult run_case_cuda_processes(const Case& data, const CudaRunOptions& options) {
  if (options.num_ranks < 1 || options.num_ranks > cuda::kMaxDeviceRanks) {
    throw_invalid("{} ranks on GPUs; 1 to {} are valid", options.num_ranks, cuda::kMaxDeviceRanks);
  }
  if (options.job && options.processes) {
    throw_invalid("processes and job exclude each other: a job's ranks are processes already");
  }
  return options.job ? run_rank_of_job(data, options) : run_forked(data, options);
}

}  // namespace uniep
