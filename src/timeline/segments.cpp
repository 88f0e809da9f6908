// SPDX-License-Identifier: Apache-2.0
#include "timeline/segments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

namespace uniep::timeline {
namespace {

int use_of(const TraceEvent& event) {
  if (event.kind == TraceKind::plan) return kPlan;
  if (event.failed != 0) return kFailed;
  return event.kind == TraceKind::wait ? kWait : static_cast<int>(event.role);
}

// A plan holds the waits of the same worker: what lies between them is left of it.
void cut_plans(std::vector<Segment>& segments) {
  std::vector<Segment> pieces;
  for (const Segment& plan : segments) {
    if (plan.use != kPlan) continue;
    std::int64_t from = plan.start_ns;
    for (const Segment& other : segments) {
      if (other.use == kPlan || other.end_ns <= from || other.start_ns >= plan.end_ns) continue;
      if (other.start_ns > from) pieces.push_back({from, other.start_ns, kPlan, plan.event});
      from = other.end_ns;
    }
    if (from < plan.end_ns) pieces.push_back({from, plan.end_ns, kPlan, plan.event});
  }
  std::erase_if(segments, [](const Segment& segment) { return segment.use == kPlan; });
  segments.insert(segments.end(), pieces.begin(), pieces.end());
}

void sort_by_start(std::vector<Segment>& segments) {
  std::stable_sort(segments.begin(), segments.end(),
                   [](const Segment& a, const Segment& b) { return a.start_ns < b.start_ns; });
}

const char* name_of_index(Role role) {
  switch (role) {
    case Role::send:
    case Role::pull:
    case Role::reduce:
      return "chunk";
    case Role::wgrad2:
    case Role::wgrad1:
      return "local expert";
    case Role::fanout:
    case Role::gemm1:
    case Role::activation:
    case Role::gemm2:
    case Role::dgrad2:
    case Role::d_activation:
    case Role::dgrad1:
    case Role::none:
      break;
  }
  return "tile";
}

}  // namespace

std::string name_of_use(int use) {
  if (use == kPlan) return "plan";
  if (use == kWait) return "wait";
  if (use == kFailed) return "failed";
  return to_string(static_cast<Role>(use));
}

Arranged arrange(const Trace& trace, int num_ranks, int workers_of_rank) {
  Arranged all;
  std::map<std::tuple<int, int, int>, Worker> workers;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (int i = 0; i < workers_of_rank; ++i) {
      Worker& worker = workers[{rank, i, 0}];
      worker.rank = rank;
      worker.worker = i;
    }
  }
  bool first = true;
  for (const TraceEvent& event : trace.events) {
    all.start_ns = first ? event.start_ns : std::min(all.start_ns, event.start_ns);
    all.end_ns = first ? event.end_ns : std::max(all.end_ns, event.end_ns);
    first = false;
    if (event.kind == TraceKind::operation) {
      all.operations.push_back(&event);
      continue;
    }
    Worker& worker = workers[{event.rank, event.worker, event.unit}];
    worker.rank = event.rank;
    worker.worker = event.worker;
    worker.unit = event.unit;
    worker.segments.push_back({event.start_ns, event.end_ns, use_of(event), &event});
  }
  all.end_ns = std::max(all.end_ns, all.start_ns + 1);
  for (auto& [key, worker] : workers) {
    sort_by_start(worker.segments);
    cut_plans(worker.segments);
    sort_by_start(worker.segments);
    for (const Segment& s : worker.segments) {
      worker.ns[static_cast<std::size_t>(s.use)] += s.end_ns - s.start_ns;
    }
    all.workers.push_back(std::move(worker));
  }
  return all;
}

std::vector<double> spread(const Arranged& all, std::int64_t TraceEvent::*amount,
                           std::size_t bins) {
  std::vector<double> sums(bins, 0.0);
  const double bin_ns = static_cast<double>(all.end_ns - all.start_ns) / static_cast<double>(bins);
  for (const Worker& worker : all.workers) {
    for (const Segment& s : worker.segments) {
      const auto whole = static_cast<double>(s.event->*amount);
      if (whole == 0) continue;
      const double from = static_cast<double>(s.start_ns - all.start_ns) / bin_ns;
      const double to = static_cast<double>(s.end_ns - all.start_ns) / bin_ns;
      for (auto bin = static_cast<std::size_t>(from); bin < bins; ++bin) {
        const auto left = static_cast<double>(bin);
        if (left > to) break;
        // One that took no time at all falls into the bin where it is.
        const double part =
            to > from ? (std::min(to, left + 1) - std::max(from, left)) / (to - from) : 1.0;
        if (part > 0) sums[bin] += whole * part;
        if (to <= from) break;
      }
    }
  }
  return sums;
}

std::string describe(const TraceEvent& event) {
  std::string text;
  if (event.kind == TraceKind::wait) {
    text = event.signal == Signal::none ? std::string("wait")
                                        : fmt::format("wait for {}", to_string(event.signal));
    if (event.peer >= 0) text += fmt::format(" of rank {}", event.peer);
    if (event.role != Role::none) text += fmt::format(", to {}", to_string(event.role));
  } else if (event.kind == TraceKind::task) {
    text = to_string(event.role);
    if (event.peer >= 0) {
      text += fmt::format(" {} rank {}", event.role == Role::send ? "to" : "from", event.peer);
    }
  } else {
    return event.kind == TraceKind::plan ? "plan" : to_string(event.pass);
  }
  if (event.index >= 0) {
    const Role role = event.kind == TraceKind::wait ? Role::none : event.role;
    text += fmt::format(", {} {}", name_of_index(role), event.index);
  }
  if (event.part >= 0) text += fmt::format(", part {}", event.part);
  if (event.expert >= 0) text += fmt::format(", expert {}", event.expert);
  if (event.kind == TraceKind::wait && event.signal != Signal::none) {
    text += fmt::format(": wanted {}, saw {}", event.awaited, event.seen);
  }
  return text;
}

}  // namespace uniep::timeline
