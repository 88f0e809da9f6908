// SPDX-License-Identifier: Apache-2.0
// The plan's kernel and host code without a GPU: the same checks as test_plan_cuda on small groups.
#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "plan_checks.hpp"

namespace uniep::cuda_test {
namespace {

// Each rank a launch of its own, at the same time, as ranks on GPUs of their own would be.
void test_separate_launches(Report& report, const Routing& routing) {
  Group group(routing);
  std::string wrong;
  for (std::uint64_t seed = 30; seed < 33; ++seed) {
    const auto ids = make_ids(routing, seed);
    group.upload(ids);
    group.poison_arrays();
    {
      std::vector<std::jthread> launches;
      for (int rank = 0; rank < group.num_ranks(); ++rank) {
        launches.emplace_back([&group, rank] {
          const RankTopk* input = &group.inputs()[static_cast<std::size_t>(rank)];
          group.plan().run({input, 1}, group.stream(), rank);
        });
      }
    }
    wrong += Group::error_of([&] { group.plan().check(group.stream()); });
    wrong += group.differences(ids);
  }
  report.check(wrong.empty(), "a launch for each rank: " + title(routing) + wrong);
}

}  // namespace
}  // namespace uniep::cuda_test

int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  const bool all = argc > 1 && std::strcmp(argv[1], "all") == 0;  // many minutes
  Report report;
  for (Routing routing : routings(!all)) {
    routing.blocks_per_rank = std::min(routing.blocks_per_rank, 3);
    test_routing(report, routing);
  }
  const Routing small{.name = "E=12 k=4, masked",
                      .placement = uniep::make_contiguous_placement(12, 4),
                      .topk = 4,
                      .tokens = {100, 64, 128, 99},
                      .mask_percent = 10,
                      .blocks_per_rank = 2};
  test_separate_launches(report, small);
  test_refused_ids(report, small);
  test_withheld_rank(report, small, std::chrono::seconds(3));  // blocks share few processors
  test_refusals(report);
  return report.finish();
}
