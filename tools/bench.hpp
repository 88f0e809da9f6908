// SPDX-License-Identifier: Apache-2.0
// What timing on the CPU and on a GPU share.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "uniep/case.hpp"

namespace uniep::tools {

struct BenchFlags {
  CaseOptions options;
  LayerOptions layer;
  std::string op = "layer", baseline = "split", json;
  std::int64_t tokens_per_rank = -1;  // -1: the shape's, split over the ranks
  std::int64_t ranks = 2, repeats = 15;
};

// Bytes of rows that leave the average rank for another in one forward.
struct Traffic {
  double dispatched = 0;
  double returned = 0;
};
[[nodiscard]] Traffic traffic_of(const Case& data, Payload payload, int num_ranks);

// Milliseconds of the repeats.
struct Spread {
  double median = 0, min = 0, max = 0;
};
[[nodiscard]] Spread spread_of(std::vector<double> ms);

// The fields that every record has.
[[nodiscard]] nlohmann::json make_record(const BenchFlags& flags, const Case& data,
                                         const std::string& schedule, const std::string& impl,
                                         const Spread& ms);

int bench_on_gpu(const BenchFlags& flags);

}  // namespace uniep::tools
