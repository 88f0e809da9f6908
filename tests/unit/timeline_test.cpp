// SPDX-License-Identifier: Apache-2.0
// The views of a timeline, of records made by hand: what must be in them, and that their size is
// bounded.
#include "timeline/timeline.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "timeline/ceilings.hpp"
#include "timeline/segments.hpp"

namespace uniep::test {
namespace {

TraceEvent event(TraceKind kind, int rank, int worker, std::int64_t start, std::int64_t end) {
  TraceEvent e;
  e.kind = kind;
  e.rank = static_cast<std::int16_t>(rank);
  e.worker = static_cast<std::int16_t>(worker);
  e.start_ns = 1000000000000 + start;
  e.end_ns = 1000000000000 + end;
  return e;
}

TraceEvent task(Role role, int rank, int worker, std::int64_t start, std::int64_t end) {
  TraceEvent e = event(TraceKind::task, rank, worker, start, end);
  e.role = role;
  return e;
}

TraceEvent wait(int rank, int worker, std::int64_t start, std::int64_t end) {
  TraceEvent e = event(TraceKind::wait, rank, worker, start, end);
  e.signal = Signal::row_ready;
  e.role = Role::fanout;
  e.peer = 1;
  e.expert = 3;
  e.index = 7;
  e.awaited = 5;
  e.seen = 4;
  return e;
}

// Two ranks of two workers, in which each role takes 10 us and waits as long in the plan and after.
Trace sample() {
  Trace trace;
  for (int rank = 0; rank < 2; ++rank) {
    trace.events.push_back(wait(rank, 0, 12000, 18000));
    trace.events.push_back(event(TraceKind::plan, rank, 0, 10000, 20000));
    for (int worker = 0; worker < 2; ++worker) {
      for (int role = 0; role < static_cast<int>(Role::none); ++role) {
        TraceEvent e =
            task(static_cast<Role>(role), rank, worker, 20000 + role * 10000, 30000 + role * 10000);
        e.index = role;
        if (e.role == Role::gemm1) e.flops = 2000000;
        if (e.role == Role::send) e.link_bytes = 30000;
        trace.events.push_back(e);
      }
      trace.events.push_back(wait(rank, worker, 140000, 150000));
    }
    trace.events.push_back(event(TraceKind::operation, rank, 0, 0, 160000));
  }
  return trace;
}

const TimelineInfo kInfo{
    .title = "a <case> & more",
    .schedule = "workers=2",
    .comm_workers = 1,
    .ceilings = {.flops_per_s = 1e12, .link_bytes_per_s = 2e10, .origin = "a test"}};

int count(const std::string& text, const std::string& part) {
  int n = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

// The number that attribute `name` has in the element that starts at `from`.
double attribute(const std::string& text, std::size_t from, const std::string& name) {
  const std::string start = " " + name + "=\"";
  return std::stod(text.substr(text.find(start, from) + start.size(), 20));
}

TEST(Segments, CutAPlanAroundItsWaits) {
  const Trace trace = sample();
  const timeline::Arranged all = timeline::arrange(trace);
  ASSERT_EQ(all.workers.size(), 4U);
  EXPECT_EQ(all.end_ns - all.start_ns, 160000);
  for (const timeline::Worker& w : all.workers) {
    EXPECT_EQ(w.ns[timeline::kPlan], w.worker == 0 ? 4000 : 0);
    EXPECT_EQ(w.ns[timeline::kWait], w.worker == 0 ? 16000 : 10000);
    for (std::size_t i = 1; i < w.segments.size(); ++i) {
      EXPECT_GE(w.segments[i].start_ns, w.segments[i - 1].end_ns);
    }
  }
}

TEST(Segments, SpreadWorkKeepsItsSum) {
  Trace trace = sample();
  trace.events.push_back(task(Role::gemm2, 0, 0, 160000, 160000));  // as short as the clock's step
  trace.events.back().flops = 77;
  const timeline::Arranged all = timeline::arrange(trace);
  for (const std::size_t bins : {1U, 3U, 7U, 16U, 1000U}) {
    const auto sums = timeline::spread(all, &TraceEvent::link_bytes, bins);
    EXPECT_NEAR(std::accumulate(sums.begin(), sums.end(), 0.0), 4 * 30000, 1e-3);
  }
  // 20 to 30 us of 160 are sends.
  EXPECT_EQ(timeline::spread(all, &TraceEvent::link_bytes, 16)[2], 4 * 30000);
}

TEST(Segments, SayWhatAWaitWasFor) {
  EXPECT_EQ(timeline::describe(wait(0, 0, 0, 1)),
            "wait for row_ready of rank 1, to fanout, tile 7, expert 3: wanted 5, saw 4");
  TraceEvent send = task(Role::send, 0, 0, 0, 1);
  send.peer = 2;
  send.index = 4;
  EXPECT_EQ(timeline::describe(send), "send to rank 2, chunk 4");
}

// What Perfetto needs: known phases with their fields, named processes and threads, and slices of a
// thread that nest or follow each other.
TEST(TraceJson, IsATraceEventFile) {
  Trace trace = sample();
  trace.dropped = 5;
  const nlohmann::json file = trace_json(trace, kInfo);
  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> slices;
  std::map<std::string, int> categories;
  std::set<std::string> names, counters;
  for (const auto& e : file.at("traceEvents")) {
    const std::string phase = e.at("ph");
    const int pid = e.at("pid");
    EXPECT_GT(pid, 0);
    if (phase == "M") {
      const std::string what = e.at("name");
      if (what == "process_name") processes[pid] = e.at("args").at("name");
      if (what == "thread_name") threads[{pid, e.at("tid")}] = e.at("args").at("name");
      if (what.ends_with("sort_index")) {
        EXPECT_TRUE(e.at("args").at("sort_index").is_number());
      }
    } else if (phase == "C") {
      counters.insert(e.at("name"));
      EXPECT_TRUE(e.at("args").at(e.at("name").get<std::string>()).is_number());
      EXPECT_GE(e.at("ts").get<double>(), 0);
    } else {
      ASSERT_EQ(phase, "X");
      const double ts = e.at("ts"), dur = e.at("dur");
      EXPECT_GE(ts, 0);
      EXPECT_GE(dur, 0);
      EXPECT_LE(ts + dur, 160.0);
      EXPECT_TRUE(e.at("args").is_object());
      names.insert(e.at("name"));
      ++categories[e.at("cat")];
      slices[{pid, e.at("tid")}].emplace_back(ts, ts + dur);
    }
  }
  EXPECT_EQ(processes,
            (std::map<int, std::string>{{1, "rank 0"}, {2, "rank 1"}, {3, "all ranks"}}));
  EXPECT_EQ(threads.size(), 2U * 3);
  for (auto& [thread, list] : slices) {
    EXPECT_TRUE(threads.contains(thread));
    std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first < b.first : a.second > b.second;
    });
    std::vector<double> open;
    for (const auto& [from, to] : list) {
      while (!open.empty() && open.back() <= from) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(to, open.back());
      }
      open.push_back(to);
    }
  }
  EXPECT_EQ(categories,
            (std::map<std::string, int>{{"task", 48}, {"wait", 6}, {"plan", 2}, {"operation", 2}}));
  for (int role = 0; role < static_cast<int>(Role::none); ++role) {
    EXPECT_TRUE(names.contains(to_string(static_cast<Role>(role))));
  }
  EXPECT_TRUE(names.contains("wait row_ready"));
  EXPECT_EQ(counters, (std::set<std::string>{"GFLOP/s", "GB/s between ranks"}));
  EXPECT_EQ(file.at("otherData").at("dropped"), 5);
  EXPECT_EQ(file.at("otherData").at("ceiling_flops_per_s"), 1e12);
}

TEST(TraceSvg, HasLanesAxisLegendCeilingsAndABarOfEveryRole) {
  const std::string svg = trace_svg(sample(), kInfo);
  EXPECT_EQ(count(svg, "<g class=\"lane\">"), 4);
  EXPECT_EQ(count(svg, ">rank "), 2);
  EXPECT_EQ(count(svg, "worker 0, comm<"), 2);
  EXPECT_EQ(count(svg, "class=\"axis\""), 1);
  EXPECT_EQ(count(svg, ">100 µs</text>"), 2);  // at both ends
  EXPECT_EQ(count(svg, "class=\"rate\""), 2);
  EXPECT_EQ(count(svg, "class=\"ceiling\""), 2);
  EXPECT_EQ(count(svg, ">ceiling 1e+03<"), 1);
  EXPECT_EQ(count(svg, ">ceiling 20<"), 1);
  EXPECT_EQ(count(svg, "a &lt;case&gt; &amp; more"), 2);
  EXPECT_EQ(count(svg, "<script") + count(svg, "href"), 0);
  const auto at = svg.find("class=\"legend\"");
  const auto legend = svg.substr(at, svg.find("</g>", at) - at);
  for (int use = 0; use <= timeline::kWait; ++use) {
    const std::string name = timeline::name_of_use(use);
    SCOPED_TRACE(name);
    EXPECT_EQ(count(legend, ">" + name + " "), 1);
    // Each takes 10 of 160 us, 62.5 of 1000 pixels; the plan what its wait leaves.
    int bars = 0;
    const std::string start = "<rect class=\"" + name + "\"";
    for (auto from = svg.find(start); from != std::string::npos; from = svg.find(start, from + 1)) {
      ++bars;
      const double width = attribute(svg, from, "width");
      EXPECT_NEAR(width, use == timeline::kPlan ? 11.9 : width < 50 ? 36.9 : 61.9, 0.2);
      EXPECT_GT(attribute(svg, from, "height"), 5);
    }
    EXPECT_EQ(bars, use == timeline::kPlan ? 4 : use == timeline::kWait ? 6 : 4);
  }
  // 124 of 160 us are busy on worker 0, 120 on worker 1.
  EXPECT_EQ(count(svg, ">77.5 %<"), 2);
  EXPECT_GE(count(svg, ">75.0 %<"), 2);
  EXPECT_EQ(count(svg, "longest waits"), 1);
  EXPECT_GE(
      count(svg, "wait for row_ready of rank 1, to fanout, tile 7, expert 3: wanted 5, saw 4"), 5);
}

// One that never came to run, or whose rank died, is a lane too, and counts in all shares.
TEST(TraceSvg, HasALaneForWorkersWithoutRecords) {
  TimelineInfo info = kInfo;
  info.num_ranks = 3;
  info.workers = 2;
  const std::string svg = trace_svg(sample(), info);
  EXPECT_EQ(count(svg, "<g class=\"lane\">"), 6);
  EXPECT_EQ(count(svg, ">rank 2<"), 1);
  EXPECT_EQ(count(svg, ">gemm1 4.2 %<"), 1);  // 40 of 6 x 160 us
  EXPECT_EQ(timeline::arrange(sample(), 3, 2).workers.size(), 6U);
}

TEST(TraceSvg, IsTextWhateverTheTitleIs) {
  TimelineInfo info = kInfo;
  info.title = "caf\xC3\xA9 \x01<";
  EXPECT_EQ(count(trace_svg(sample(), info), "caf\xC3\xA9 &lt;</text>"), 1);
  info.title = "caf\xE9";
  EXPECT_EQ(count(trace_svg(sample(), info), "caf?</text>"), 1);
}

TEST(TraceSvg, LeavesOutWhatNobodyKnows) {
  TimelineInfo info = kInfo;
  info.ceilings = {};
  Trace trace = sample();
  for (TraceEvent& e : trace.events) e.link_bytes = 0;
  const std::string svg = trace_svg(trace, info);
  EXPECT_EQ(count(svg, "class=\"ceiling\""), 0);
  EXPECT_EQ(count(svg, "class=\"rate\""), 1);
  const std::string empty = trace_svg({}, {});
  EXPECT_TRUE(empty.ends_with("</svg>\n"));
  EXPECT_EQ(count(empty, "class=\"lane\""), 0);
  EXPECT_EQ(trace_json({}, {}).at("traceEvents").size(), 0U);
}

TEST(TraceSvg, ShowsFailuresAndLostRecords) {
  Trace trace = sample();
  EXPECT_EQ(count(trace_svg(trace, kInfo), "fill=\"#d62728\""), 0);
  trace.dropped = 12;
  for (TraceEvent& e : trace.events) {
    if (e.kind == TraceKind::wait && e.end_ns % 1000000 == 150000) e.failed = 1;
  }
  const std::string svg = trace_svg(trace, kInfo);
  EXPECT_EQ(count(svg, "<rect class=\"failed\""), 4);
  EXPECT_EQ(count(svg, ">failed 6.2 %<") + count(svg, ">failed 6.3 %<"), 1);
  EXPECT_EQ(count(svg, "12 older records were not kept"), 1);
}

TEST(TraceSvg, GrowsNeitherWithRecordsNorWithWorkers) {
  Trace many;
  for (int i = 0; i < 100000; ++i) {
    // Of each microsecond a gemm1 takes most, a send the rest.
    many.events.push_back(task(Role::gemm1, 0, 0, i * 1000, i * 1000 + 600));
    many.events.push_back(task(Role::send, 0, 0, i * 1000 + 600, i * 1000 + 900));
  }
  const std::string svg = trace_svg(many, kInfo);
  EXPECT_LT(svg.size(), 100000U);
  EXPECT_EQ(count(svg, "<path class=\"gemm1\""), 1);
  EXPECT_EQ(count(svg, "<path class=\"send\""), 0);  // in no column the most, but in the legend
  EXPECT_EQ(count(svg, ">send 30.0 %<"), 1);

  for (const auto& [ranks, workers] :
       {std::pair{1, 1000}, {3, 100}, {64, 4}, {300, 2}, {1024, 1}}) {
    SCOPED_TRACE(ranks);
    Trace wide;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int worker = 0; worker < workers; ++worker) {
        wide.events.push_back(task(Role::gemm1, rank, worker, 0, 1000));
      }
    }
    const std::string picture = trace_svg(wide, kInfo);
    EXPECT_LE(count(picture, "<g class=\"lane\">"), 128);
    EXPECT_GE(count(picture, "<g class=\"lane\">"), 32);
    EXPECT_EQ(count(picture, "class=\"gemm1\""), count(picture, "<g class=\"lane\">"));
  }
}

TEST(Ceilings, AreMeasuredForEveryTypeAndAnyWidth) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Ceilings small = measure_ceilings({}, dtype, 8, 1);
    EXPECT_GT(small.flops_per_s, 0);
    EXPECT_GT(small.link_bytes_per_s, 0);
    EXPECT_EQ(small.origin, "measured on 1 thread just before");
  }
}

}  // namespace
}  // namespace uniep::test
