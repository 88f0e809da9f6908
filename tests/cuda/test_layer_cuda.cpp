// SPDX-License-Identifier: Apache-2.0
// The split layer on a GPU with virtual ranks: every rank count and schedule against one rank, bit
// by bit, and one rank against f64. `quick` leaves out what compute-sanitizer makes too slow to
// wait for; `--bench` prints timings instead.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "layer_checks.hpp"

namespace uniep::cuda_test {
namespace {

std::vector<LayerCase> layer_cases(bool quick) {
  std::vector<LayerCase> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    list.push_back(layer_case("E=10 k=3, masked", {"", 64, 48, 10, 3, 300}, dtype, "W0", 0.2));
    list.push_back(layer_case("ragged", {"", 136, 72, 8, 2, 257}, dtype, "W4", 0, 8));
    if (quick) continue;
    list.push_back(layer_case("E=3 k=3, fewer experts than ranks", {"", 64, 72, 3, 3, 333}, dtype));
    list.push_back(layer_case("one hot", {"", 64, 128, 6, 1, 1000}, dtype, "one-hot"));
    list.push_back(layer_case("hot rank", {"", 256, 192, 32, 8, 2048}, dtype, "W2", 0, 8));
    list.push_back(layer_case("all masked", {"", 64, 64, 4, 2, 64}, dtype, "W0", 1));
    list.push_back(layer_case("no tokens", {"", 64, 64, 4, 2, 0}, dtype));
  }
  if (!quick) {
    list.push_back(layer_case("k=40", {"", 64, 64, 48, 40, 100}, DType::bf16));
    list.push_back(layer_case("H=2880", {"", 2880, 320, 16, 4, 500}, DType::bf16, "zipf:1.2"));
  }
  return list;
}

// Back to back without the host looking: one hash.
void test_repeats(Report& report, Fusion fusion) {
  const Case data = layer_case("", {"", 256, 128, 16, 4, 1024}, DType::bf16, "W1").data;
  CudaRunOptions options{.num_ranks = 8,
                         .schedule = {.fusion = fusion, .blocks_per_rank = 8},
                         .gemm = GemmEngine::tensor_cores,
                         .backward = true};
  std::string wrong;
  wrong += layer_error_of([&] {
    const CaseResult first = run_case_cuda(data, options);
    options.repeats = 300;
    wrong += describe_difference(data, first, run_case_cuda(data, options));
  });
  report.check(wrong.empty(), "300 repeats end as one " + wrong);
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Forward and backward of one shape, all virtual ranks on this GPU. The link is its own memory, so
// these are no times of a group; they show what the steps cost beside each other.
void bench(const Shape& shape, int num_ranks, const SplitSchedule& schedule) {
  constexpr int kRuns = 20;
  const Case data = layer_case("", shape, DType::bf16).data;
  LayerWorld world(data, num_ranks, schedule, GemmEngine::tensor_cores, std::chrono::seconds(10));
  SplitLayer layer = world.layer(0, num_ranks);
  const CaseTensors tensors(data, world.placement, true);
  cudaEvent_t events[3];
  for (cudaEvent_t& event : events) UNIEP_CUDA_CHECK(cudaEventCreate(&event));
  std::vector<double> forward, backward;
  for (int i = 0; i < kRuns + 3; ++i) {
    UNIEP_CUDA_CHECK(cudaEventRecord(events[0], nullptr));
    SplitLayer::Saved saved = layer.forward(tensors.forward(), nullptr);
    UNIEP_CUDA_CHECK(cudaEventRecord(events[1], nullptr));
    layer.backward(saved, tensors.backward(), nullptr);
    UNIEP_CUDA_CHECK(cudaEventRecord(events[2], nullptr));
    layer.check(saved, nullptr);
    layer.release(std::move(saved));
    float ms = 0;
    UNIEP_CUDA_CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
    if (i >= 3) forward.push_back(ms);
    UNIEP_CUDA_CHECK(cudaEventElapsedTime(&ms, events[1], events[2]));
    if (i >= 3) backward.push_back(ms);
  }
  for (cudaEvent_t event : events) UNIEP_CUDA_CHECK(cudaEventDestroy(event));
  std::printf(
      "%-16s R=%d tokens a rank %lld, %s: forward %.3f ms, backward %.3f ms (medians of %d)\n",
      shape.name.c_str(), num_ranks, static_cast<long long>(shape.tokens / num_ranks),
      describe(schedule).c_str(), median_of(forward), median_of(backward), kRuns);
  std::fflush(stdout);
}

int run_bench() {
  Shape shape = find_shape("qwen3-30b-a3b");
  shape.tokens = 8192;
  for (const int num_ranks : {1, 2, 4}) {
    for (const Payload payload : {Payload::rank, Payload::choice}) {
      for (const Direction combine : {Direction::push, Direction::pull}) {
        bench(shape, num_ranks, {.payload = payload, .combine = combine});
        if (num_ranks == 1) break;
      }
      for (const int push_warps : {4, 6, 8}) {
        for (const int chunk : {4, 8, 16, 32}) {
          for (const int blocks : {8, 16, 24}) {
            bench(shape, num_ranks,
                  {.fusion = Fusion::fused,
                   .payload = payload,
                   .blocks_per_rank = blocks,
                   .push_warps = push_warps,
                   .chunk = chunk});
          }
        }
        if (num_ranks == 1) break;
      }
      if (num_ranks == 1) break;
    }
  }
  return 0;
}

int run_tests(bool quick) {
  Report report;
  const LayerLimits limits{.num_sms = 0,
                           .bf16 = GemmEngine::tensor_cores,
                           .f32_has_cpu_bits = false,
                           .ranks = quick ? std::vector<int>{2} : std::vector<int>{1, 2, 4, 8},
                           .stride = quick ? 3 : 1};
  for (const LayerCase& c : layer_cases(quick)) test_layer(report, c, limits);
  test_interleaved(report, GemmEngine::tensor_cores, DType::bf16, 0);
  test_interleaved(report, GemmEngine::tensor_cores, DType::bf16, 0, Fusion::fused);
  test_interleaved(report, GemmEngine::fma, DType::f32, 0);
  if (quick) return report.finish();
  test_repeats(report, Fusion::split);
  test_repeats(report, Fusion::fused);
  test_layer_refusals(report, 0);
  return report.finish();
}

}  // namespace
}  // namespace uniep::cuda_test

int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    return what == "--bench" ? run_bench() : run_tests(what == "quick");
  } catch (const uniep::Error& error) {
    std::printf("FAIL %s\n", error.what());
    return 3;
  }
}
