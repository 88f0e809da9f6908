// SPDX-License-Identifier: Apache-2.0
// The plan's kernel and host code without a GPU: the same checks as test_plan_cuda on small groups.
#include <algorithm>
#include <cstring>

#include "plan_checks.hpp"

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
  test_refused_ids(report, small);
  test_withheld_rank(report, small, std::chrono::seconds(2));  // blocks share few processors
  test_refusals(report);
  return report.finish();
}
