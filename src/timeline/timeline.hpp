// SPDX-License-Identifier: Apache-2.0
// Two views of records, wherever they were written: a file for Perfetto, and a picture.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "uniep/trace.hpp"

namespace uniep {

// Of all ranks together; 0: unknown, and not drawn.
struct Ceilings {
  double flops_per_s = 0;
  double link_bytes_per_s = 0;
  std::string origin;  // in a few words, where they are from
};

struct TimelineInfo {
  std::string title;     // what ran, in a line
  std::string schedule;  // of that run
  // That ran, whether or not they recorded something; 0: those that did.
  int num_ranks = 0;
  int workers = 0;       // of each rank
  int comm_workers = 0;  // the first so many workers of a rank begin with moving rows
  Ceilings ceilings;
};

// Trace-event JSON, as Perfetto and chrome://tracing open it. A process a rank (pid: rank + 1), in
// it a thread for whole operations (tid 1) and one for each worker and unit; times in microseconds
// from the first record. Categories: task, wait, plan, operation. Counters of products and of bytes
// between ranks are a process of their own. What is not an event is in otherData.
[[nodiscard]] nlohmann::json trace_json(const Trace& trace, const TimelineInfo& info);

// An SVG picture without scripts or outside references. Its parts have the classes lane, axis,
// legend, rate, ceiling and waits, and a bar that of its role, plan, wait or failed.
[[nodiscard]] std::string trace_svg(const Trace& trace, const TimelineInfo& info);

}  // namespace uniep
