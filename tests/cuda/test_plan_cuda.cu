// SPDX-License-Identifier: Apache-2.0
// The plan on the device, with virtual ranks, against the CPU's, for many routings and rank counts;
// graph replay; refused ids; a rank that does not come. `quick` leaves out what is large and what
// compute-sanitizer makes too slow to wait for, `--bench` prints timings instead.
#include <algorithm>
#include <string>
#include <vector>

#include "plan_checks.hpp"

namespace uniep::cuda_test {
namespace {

void test_graph(Report& report, const Routing& routing) {
  Group group(routing);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  UNIEP_CUDA_CHECK(cudaStreamBeginCapture(group.stream(), cudaStreamCaptureModeThreadLocal));
  group.plan().run(group.inputs(), group.stream());
  UNIEP_CUDA_CHECK(cudaStreamEndCapture(group.stream(), &graph));
  UNIEP_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  std::string wrong;
  for (std::uint64_t seed = 10; seed < 20; ++seed) {
    const Ids ids = make_ids(routing, seed);
    group.upload(ids);
    group.poison_arrays();
    UNIEP_CUDA_CHECK(cudaGraphLaunch(exec, group.stream()));
    wrong += Group::error_of([&] { group.plan().check(group.stream()); });
    wrong += group.differences(ids);
  }
  // Back to back, the host never looking.
  const Ids ids = make_ids(routing, 20);
  group.upload(ids);
  group.poison_arrays();
  for (int i = 0; i < 50; ++i) UNIEP_CUDA_CHECK(cudaGraphLaunch(exec, group.stream()));
  wrong += Group::error_of([&] { group.plan().check(group.stream()); });
  wrong += group.differences(ids);
  report.check(wrong.empty(), "graph replays with other ids: " + title(routing) + wrong);
  UNIEP_CUDA_CHECK(cudaGraphExecDestroy(exec));
  UNIEP_CUDA_CHECK(cudaGraphDestroy(graph));
}

// Each rank a launch and a stream of its own, as ranks on GPUs of their own would be.
void test_separate_launches(Report& report, const Routing& routing) {
  Group group(routing, std::chrono::milliseconds(500));
  std::vector<cudaStream_t> streams(group.inputs().size());
  for (cudaStream_t& stream : streams) UNIEP_CUDA_CHECK(cudaStreamCreate(&stream));
  std::string wrong;
  for (std::uint64_t seed = 30; seed < 35; ++seed) {
    const Ids ids = make_ids(routing, seed);
    group.upload(ids);
    group.poison_arrays();
    for (std::size_t i = 0; i < streams.size(); ++i) {
      const std::size_t rank = (i + seed) % streams.size();
      group.plan().run({&group.inputs()[rank], 1}, streams[rank], static_cast<int>(rank));
    }
    for (cudaStream_t stream : streams) {
      wrong += Group::error_of([&] { group.plan().check(stream); });
    }
    wrong += group.differences(ids);
  }
  report.check(wrong.empty(), "a launch for each rank: " + title(routing) + wrong);
  for (cudaStream_t stream : streams) UNIEP_CUDA_CHECK(cudaStreamDestroy(stream));
}

void print_times(const char* what, int num_ranks, int blocks, std::vector<float> ms) {
  std::sort(ms.begin(), ms.end());
  std::printf("%-14s R=%-2d %2d blocks a rank: median %.2f us, min %.2f, max %.2f, %zu runs\n",
              what, num_ranks, blocks, 1e3F * ms[ms.size() / 2], 1e3F * ms.front(),
              1e3F * ms.back(), ms.size());
}

// Single launches between events, and graphs of 20 launches a replay.
void bench(int num_ranks, int blocks) {
  constexpr int kRuns = 51, kInGraph = 20;
  const Routing routing = bench_routing(num_ranks, blocks);
  Group group(routing);
  group.upload(make_ids(routing, 60));
  cudaEvent_t start = nullptr, stop = nullptr;
  UNIEP_CUDA_CHECK(cudaEventCreate(&start));
  UNIEP_CUDA_CHECK(cudaEventCreate(&stop));
  const auto times = [&](int launches, auto launch) {
    std::vector<float> list;
    for (int i = 0; i < kRuns + 5; ++i) {
      UNIEP_CUDA_CHECK(cudaEventRecord(start, group.stream()));
      launch();
      UNIEP_CUDA_CHECK(cudaEventRecord(stop, group.stream()));
      UNIEP_CUDA_CHECK(cudaEventSynchronize(stop));
      float ms = 0;
      UNIEP_CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 5) list.push_back(ms / static_cast<float>(launches));
    }
    return list;
  };
  const auto run = [&] { group.plan().run(group.inputs(), group.stream()); };
  print_times("single launch", num_ranks, blocks, times(1, run));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  UNIEP_CUDA_CHECK(cudaStreamBeginCapture(group.stream(), cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kInGraph; ++i) run();
  UNIEP_CUDA_CHECK(cudaStreamEndCapture(group.stream(), &graph));
  UNIEP_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  print_times("in a graph", num_ranks, blocks,
              times(kInGraph, [&] { UNIEP_CUDA_CHECK(cudaGraphLaunch(exec, group.stream())); }));
  UNIEP_CUDA_CHECK(cudaGraphExecDestroy(exec));
  UNIEP_CUDA_CHECK(cudaGraphDestroy(graph));
  group.plan().check(group.stream());
  UNIEP_CUDA_CHECK(cudaEventDestroy(start));
  UNIEP_CUDA_CHECK(cudaEventDestroy(stop));
}

int run_tests(bool quick) {
  Report report;
  for (const Routing& routing : routings(quick)) test_routing(report, routing);
  const Routing small{.name = "E=12 k=4, masked",
                      .placement = make_contiguous_placement(12, 4),
                      .topk = 4,
                      .tokens = {100, 64, 128, 99},
                      .mask_percent = 10,
                      .blocks_per_rank = 8};
  test_graph(report, small);
  test_refused_ids(report, small);
  if (quick) return report.finish();
  test_separate_launches(report, small);
  test_withheld_rank(report, small, std::chrono::milliseconds(30));
  test_graph(report, bench_routing(8, 16));
  test_refusals(report);
  return report.finish();
}

}  // namespace
}  // namespace uniep::cuda_test

int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  const std::string what = argc > 1 ? argv[1] : "";
  try {
    if (what != "--bench") return run_tests(what == "quick");
    for (const int num_ranks : {2, 8}) {
      for (const int blocks : {8, 16, 32}) bench(num_ranks, blocks);
    }
    return 0;
  } catch (const uniep::Error& error) {
    std::printf("FAIL %s\n", error.what());
    return 3;
  }
}
