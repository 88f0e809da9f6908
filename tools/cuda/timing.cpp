// SPDX-License-Identifier: Apache-2.0
// Timings on a GPU, by its own events.
#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#include "cuda/device.hpp"
#include "cuda/grouped_gemm.hpp"
#include "layer/cuda/random_pattern.hpp"

namespace uniep::tools {
namespace {

using cuda::DeviceArray;
using cuda::SplitLayer;

constexpr int kWarmUps = 3;

class Event {
 public:
  Event() { check_cuda(cudaEventCreate(&event_), "an event cannot be made"); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void record() { check_cuda(cudaEventRecord(event_, nullptr), "an event cannot be recorded"); }
  void wait() { check_cuda(cudaEventSynchronize(event_), "a kernel failed"); }
  [[nodiscard]] double ms_until(const Event& end) const {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, event_, end.event_), "an event cannot be read");
    return ms;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// The events of one operation: one at the start of each stage, the last at the end.
struct Marks {
  std::vector<std::pair<std::string, std::unique_ptr<Event>>> list;

  void add(const char* stage) {
    list.emplace_back(stage, std::make_unique<Event>());
    list.back().second->record();
  }
  // Adds each stage's time, and the whole operation's under `operation`.
  void collect(const std::string& operation, const std::string& prefix, Times& times) const {
    for (std::size_t i = 0; i + 1 < list.size(); ++i) {
      times[prefix + list[i].first].push_back(list[i].second->ms_until(*list[i + 1].second));
    }
    times[operation].push_back(list.front().second->ms_until(*list.back().second));
  }
};

// A product as SplitLayer makes it.
struct Kind {
  cuda::GemmOp op;
  bool is_f32;    // its result
  bool is_first;  // of gemm1 and its gradients: w1 is [E_l, 2 * ffn, hidden], w2 [E_l, hidden, ffn]
};

Kind kind_of(Product product) {
  switch (product) {
    case Product::gemm1:
      return {.op = cuda::GemmOp::fprop_swiglu, .is_f32 = false, .is_first = true};
    case Product::gemm2:
      return {.op = cuda::GemmOp::fprop, .is_f32 = false, .is_first = false};
    case Product::dgrad2:
      return {.op = cuda::GemmOp::dgrad, .is_f32 = true, .is_first = false};
    case Product::dgrad1:
      return {.op = cuda::GemmOp::dgrad, .is_f32 = false, .is_first = true};
    case Product::wgrad2:
      return {.op = cuda::GemmOp::wgrad, .is_f32 = true, .is_first = false};
    case Product::wgrad1:
      break;
  }
  return {.op = cuda::GemmOp::wgrad, .is_f32 = true, .is_first = true};
}

// A repeat is as many calls, one after the other, as take some milliseconds.
template <typename Call>
std::vector<double> time_calls(int repeats, Call call) {
  constexpr double kBatchMs = 10;
  const auto time_batch = [&call](std::int64_t calls) {
    Event start, end;
    start.record();
    for (std::int64_t i = 0; i < calls; ++i) call();
    end.record();
    end.wait();
    return start.ms_until(end) / static_cast<double>(calls);
  };
  static_cast<void>(time_batch(kWarmUps));
  const double estimate = std::max(time_batch(kWarmUps), 1e-3);
  const auto calls = std::max<std::int64_t>(1, std::llround(kBatchMs / estimate));
  std::vector<double> ms;
  for (int i = 0; i < repeats; ++i) ms.push_back(time_batch(calls));
  return ms;
}

template <typename T>
DeviceArray<T> upload(const std::vector<T>& values, const char* what) {
  DeviceArray<T> array(static_cast<std::int64_t>(values.size()), what);
  check_cuda(
      cudaMemcpy(array.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
      "a table cannot be copied to the GPU");
  return array;
}

}  // namespace

Times time_layer(const Case& data, const CudaOptions& options, std::uint64_t seed) {
  const CudaRunOptions run = to_run_options(data, options);
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), run.num_ranks);
  const cuda::LayerShape shape = layer_shape_of(data, run.num_ranks, run.gemm);
  const cuda::SymmetricMemory memory(
      run.num_ranks, SplitLayer::bytes_per_rank(shape, run.schedule, placement), run.wait_bound);
  SplitLayer layer(memory, shape, run.schedule, placement, 0, run.num_ranks);
  const CaseTensors tensors = CaseTensors::random(data, placement, run.backward, seed);
  const auto forward_tensors = tensors.forward();
  const auto backward_tensors =
      run.backward ? tensors.backward() : std::vector<cuda::BackwardTensors>{};

  struct Operation {
    Marks forward, backward;
  };
  std::vector<Operation> operations(static_cast<std::size_t>(kWarmUps + run.repeats));
  for (Operation& operation : operations) {
    layer.set_observer([&](const char* stage) { operation.forward.add(stage); });
    SplitLayer::Saved saved = layer.forward(forward_tensors, nullptr);
    layer.set_observer([&](const char* stage) { operation.backward.add(stage); });
    if (run.backward) layer.backward(saved, backward_tensors, nullptr);
    // The host runs ahead of the GPU, so that launching is no part of the times; in between it
    // looks whether all is well.
    if (&operation == &operations.back() || &operation == &operations.front()) {
      layer.check(saved, nullptr);
    }
    layer.release(std::move(saved));
  }
  Times times;
  for (const Operation& operation : std::span(operations).subspan(kWarmUps)) {
    operation.forward.collect("forward", "", times);
    if (!run.backward) continue;
    operation.backward.collect("backward", "backward ", times);
    times["layer"].push_back(
        operation.forward.list.front().second->ms_until(*operation.backward.list.back().second));
  }
  return times;
}

std::vector<double> time_product(const ProductTask& task, int repeats, int sms,
                                 std::uint64_t seed) {
  if (kIsEmulated) throw_world("tensor cores are not emulated, and grouped_gemm needs them");
  std::vector<std::int64_t> starts;
  std::int64_t capacity = 0;
  for (const std::int64_t rows : task.expert_rows) {
    starts.push_back(capacity);
    capacity += (rows + 63) / 64 * 64;
  }
  capacity = std::max<std::int64_t>(capacity, 64);
  const Kind kind = kind_of(task.product);
  const std::int64_t n = kind.is_first ? 2 * task.ffn : task.hidden;
  const std::int64_t k = kind.is_first ? task.hidden : task.ffn;
  const auto experts = static_cast<std::int64_t>(starts.size());
  const bool is_wgrad = kind.op == cuda::GemmOp::wgrad;
  const bool is_dgrad = kind.op == cuda::GemmOp::dgrad;
  const bool is_swiglu = kind.op == cuda::GemmOp::fprop_swiglu;
  const std::int64_t weights = experts * n * k;
  const std::int64_t out_elements = is_wgrad    ? weights
                                    : is_dgrad  ? capacity * k
                                    : is_swiglu ? capacity * task.ffn
                                                : capacity * n;
  const RandomPattern pattern(DType::bf16, seed);
  const auto matrix = [&pattern](bool is_read, std::int64_t count, float scale, const char* what) {
    return is_read ? pattern.make(2 * count, scale, what) : DeviceArray<std::byte>();
  };
  // Random rows also in the padding, where a layer has zeros: a little more is multiplied.
  const auto x = matrix(!is_dgrad, capacity * k, 1, "x");
  const auto d_y = matrix(is_dgrad || is_wgrad, capacity * n, 1, "d_y");
  const auto w = matrix(!is_wgrad, weights, 1.0F / std::sqrt(static_cast<float>(k)), "w");
  const DeviceArray<std::byte> out(out_elements * (kind.is_f32 ? 4 : 2), "the product");
  const DeviceArray<std::byte> h(is_swiglu ? 2 * capacity * n : 0, "h");
  const auto row_weights = upload(
      std::vector<float>(static_cast<std::size_t>(is_swiglu ? capacity : 1), 0.125F), "weights");
  const auto device_starts = upload(starts, "starts");
  const auto device_rows = upload(task.expert_rows, "rows");
  const auto tickets = upload(std::vector<std::uint32_t>{0}, "tickets");
  const cuda::GroupedGemm problem{.n = n,
                                  .k = k,
                                  .x = x.get(),
                                  .d_y = d_y.get(),
                                  .w = w.get(),
                                  .out = out.get(),
                                  .h = h.get(),
                                  .row_weights = is_swiglu ? row_weights.get() : nullptr};
  return time_calls(repeats, [&] {
    cuda::run_grouped_gemm(kind.op, cuda::ElementType::bf16,
                           kind.is_f32 ? cuda::ElementType::f32 : cuda::ElementType::bf16,
                           {.starts = device_starts.get(),
                            .rows = device_rows.get(),
                            .num_experts = static_cast<int>(experts),
                            .capacity = capacity},
                           {&problem, 1}, {.num_sms = sms, .tickets = tickets.get()});
  });
}

std::vector<double> time_copy(std::int64_t bytes, int repeats) {
  const DeviceArray<std::byte> from(bytes, "a copy");
  const DeviceArray<std::byte> to(bytes, "a copy");
  check_cuda(cudaMemset(from.get(), 0, static_cast<std::size_t>(bytes)), "memory cannot be set");
  return time_calls(repeats, [&] {
    check_cuda(cudaMemcpyAsync(to.get(), from.get(), static_cast<std::size_t>(bytes),
                               cudaMemcpyDeviceToDevice, nullptr),
               "memory cannot be copied");
  });
}

}  // namespace uniep::tools
