// SPDX-License-Identifier: Apache-2.0
// What this machine reaches at best, measured now: the lines above the rates of a timeline.
#pragma once

#include <cstdint>

#include "timeline/timeline.hpp"
#include "uniep/dtype.hpp"
#include "uniep/schedule.hpp"

namespace uniep {

// The best of several rounds, some tenths of a second in all: products of one tile of the schedule
// over `hidden`, and copies of rows of `hidden` elements, by as many threads as `num_workers` and
// the machine's cores allow at a time.
[[nodiscard]] Ceilings measure_ceilings(const Schedule& schedule, DType dtype, std::int64_t hidden,
                                        int num_workers);

}  // namespace uniep
