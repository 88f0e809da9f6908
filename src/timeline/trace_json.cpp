// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "timeline/segments.hpp"
#include "timeline/timeline.hpp"

namespace uniep {
namespace {

using nlohmann::json;
using timeline::Arranged;

constexpr int kOperationsThread = 1;
constexpr std::size_t kCounterBins = 500;

// 0 would be the idle process of Linux, which viewers treat specially.
int process_of(int rank) { return rank + 1; }

json named(const char* what, int pid, int tid, const json& value) {
  const bool is_name = value.is_string();
  return {{"ph", "M"},
          {"name", what},
          {"pid", pid},
          {"tid", tid},
          {"args", {{is_name ? "name" : "sort_index", value}}}};
}

std::string name_of(const TraceEvent& event) {
  switch (event.kind) {
    case TraceKind::task:
      return to_string(event.role);
    case TraceKind::wait:
      return fmt::format("wait {}", event.signal == Signal::none ? "" : to_string(event.signal));
    case TraceKind::plan:
      return "plan";
    case TraceKind::operation:
      return to_string(event.pass);
  }
  return "unknown";
}

json args_of(const TraceEvent& event) {
  json args{{"pass", to_string(event.pass)}};
  const auto add = [&args](const char* name, std::int64_t value, std::int64_t nothing) {
    if (value != nothing) args[name] = value;
  };
  add("index", event.index, -1);
  add("part", event.part, -1);
  add("expert", event.expert, -1);
  add("peer", event.peer, -1);
  add("flops", event.flops, 0);
  add("link_bytes", event.link_bytes, 0);
  if (event.kind == TraceKind::wait) {
    if (event.role != Role::none) args["for"] = to_string(event.role);
    args["awaited"] = event.awaited;
    args["seen"] = event.seen;
  }
  if (event.failed != 0) args["failed"] = true;
  return args;
}

double micros(std::int64_t ns) { return static_cast<double>(ns) / 1000.0; }

void add_counter(json& events, const Arranged& all, std::int64_t TraceEvent::*amount,
                 const char* name, int pid) {
  const double bin_ns = static_cast<double>(all.end_ns - all.start_ns) / kCounterBins;
  const auto sums = timeline::spread(all, amount, kCounterBins);
  if (std::all_of(sums.begin(), sums.end(), [](double sum) { return sum == 0; })) return;
  double last = -1;
  for (std::size_t i = 0; i <= sums.size(); ++i) {
    const double rate = i < sums.size() ? sums[i] / bin_ns : 0;  // 1e9 a second
    if (rate == last) continue;
    last = rate;
    events.push_back({{"ph", "C"},
                      {"name", name},
                      {"pid", pid},
                      {"ts", static_cast<double>(i) * bin_ns / 1000.0},
                      {"args", {{name, rate}}}});
  }
}

}  // namespace

json trace_json(const Trace& trace, const TimelineInfo& info) {
  const Arranged all = timeline::arrange(trace, info.num_ranks, info.workers);
  int units = 1, num_ranks = 0;
  for (const timeline::Worker& w : all.workers) {
    units = std::max(units, w.unit + 1);
    num_ranks = std::max(num_ranks, w.rank + 1);
  }
  const auto thread_of = [units](int worker, int unit) {
    return kOperationsThread + 1 + worker * units + unit;
  };
  json events = json::array();
  std::set<int> ranks;
  for (const TraceEvent* operation : all.operations) ranks.insert(operation->rank);
  for (const timeline::Worker& w : all.workers) ranks.insert(w.rank);
  for (const int rank : ranks) {
    const int pid = process_of(rank);
    events.push_back(named("process_name", pid, 0, fmt::format("rank {}", rank)));
    events.push_back(named("process_sort_index", pid, 0, pid));
    events.push_back(named("thread_name", pid, kOperationsThread, "operations"));
    events.push_back(named("thread_sort_index", pid, kOperationsThread, kOperationsThread));
  }
  for (const timeline::Worker& w : all.workers) {
    const int pid = process_of(w.rank), tid = thread_of(w.worker, w.unit);
    std::string name = fmt::format("worker {}", w.worker);
    if (units > 1) name += fmt::format(", unit {}", w.unit);
    events.push_back(named("thread_name", pid, tid, name));
    events.push_back(named("thread_sort_index", pid, tid, tid));
  }
  for (const TraceEvent& event : trace.events) {
    const bool is_operation = event.kind == TraceKind::operation;
    events.push_back(
        {{"ph", "X"},
         {"name", name_of(event)},
         {"cat", to_string(event.kind)},
         {"pid", process_of(event.rank)},
         {"tid", is_operation ? kOperationsThread : thread_of(event.worker, event.unit)},
         {"ts", micros(event.start_ns - all.start_ns)},
         {"dur", micros(event.end_ns - event.start_ns)},
         {"args", args_of(event)}});
  }
  const int counters = process_of(num_ranks);
  const std::size_t before = events.size();
  add_counter(events, all, &TraceEvent::flops, "GFLOP/s", counters);
  add_counter(events, all, &TraceEvent::link_bytes, "GB/s between ranks", counters);
  if (events.size() > before) {
    events.push_back(named("process_name", counters, 0, "all ranks"));
    events.push_back(named("process_sort_index", counters, 0, counters));
  }
  json other{{"title", info.title}, {"schedule", info.schedule}, {"dropped", trace.dropped}};
  if (info.ceilings.flops_per_s > 0) other["ceiling_flops_per_s"] = info.ceilings.flops_per_s;
  if (info.ceilings.link_bytes_per_s > 0) {
    other["ceiling_link_bytes_per_s"] = info.ceilings.link_bytes_per_s;
  }
  if (!info.ceilings.origin.empty()) other["ceilings_from"] = info.ceilings.origin;
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}, {"otherData", other}};
}

}  // namespace uniep
