// SPDX-License-Identifier: Apache-2.0
// The simulated run: the engine keeps order and refuses what can never start; closed-form cases
// take the time of the closed form; every record is of a lane that does one thing at a time, and
// all of them add up to the layer's products and rows.
#include "simulate/event_run.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "io/routing.hpp"
#include "simulate/event_engine.hpp"
#include "simulate/score.hpp"
#include "timeline/timeline.hpp"

namespace uniep::simulate {
namespace {

const std::string kH200 = UNIEP_SOURCE_DIR "/hw/h200.json";

SimTask task_of(std::int32_t index, double us) {
  SimTask t;
  t.event.role = Role::gemm1;
  t.event.index = index;
  t.busy_us = us;
  return t;
}

void draw_from(EventEngine& e, std::int16_t worker, int list) {
  EventEngine::Stretch stretch;
  stretch.lists = {list};
  e.add_worker(worker, 0, {stretch});
}

TEST(EventEngine, WorkersDrawFromTheirListInOrder) {
  EventEngine e;
  const int list = e.add_list();
  for (int i = 0; i < 5; ++i) e.add_task(list, task_of(i, 10));
  for (std::int16_t w = 0; w < 2; ++w) draw_from(e, w, list);
  const auto result = e.run();
  EXPECT_DOUBLE_EQ(result.end_us, 30);  // three waves
  ASSERT_EQ(result.events.size(), 5U);
  for (std::int32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(result.events[static_cast<std::size_t>(i)].index, i);
  }
}

TEST(EventEngine, AWaitIsRecordedAndEndsWithItsSignal) {
  EventEngine e;
  const int counter = e.add_counter();
  const int producers = e.add_list(), consumers = e.add_list();
  SimTask producer = task_of(0, 10);
  producer.raises.push_back({counter, 1, 2.5});
  e.add_task(producers, producer);
  SimTask consumer = task_of(1, 4);
  consumer.needs.push_back({counter, 1});
  consumer.signal = Signal::tile_ready;
  e.add_task(consumers, consumer);
  draw_from(e, 0, producers);
  draw_from(e, 1, consumers);
  const auto result = e.run();
  EXPECT_DOUBLE_EQ(result.end_us, 16.5);
  ASSERT_EQ(result.events.size(), 3U);
  const TraceEvent& wait = result.events[1];
  EXPECT_EQ(wait.kind, TraceKind::wait);
  EXPECT_EQ(wait.signal, Signal::tile_ready);
  EXPECT_EQ(wait.start_ns, 0);
  EXPECT_EQ(wait.end_ns, 12500);
}

TEST(EventEngine, AResourceServesOneAfterTheOther) {
  EventEngine e;
  const int link = e.add_resource(100);
  const int list = e.add_list();
  for (int i = 0; i < 4; ++i) {
    SimTask t = task_of(i, 1);
    t.uses.push_back({link, 1000});
    e.add_task(list, t);
  }
  for (std::int16_t w = 0; w < 4; ++w) draw_from(e, w, list);
  EXPECT_DOUBLE_EQ(e.run().end_us, 40);
}

// One worker draws a task that waits before the one that its signal is from: it holds the only
// worker for ever. Two workers would hide that.
TEST(EventEngine, ATaskDrawnBeforeWhatItNeedsIsRefusedByName) {
  for (const int workers : {1, 2}) {
    EventEngine e;
    const int counter = e.add_counter();
    const int list = e.add_list();
    SimTask consumer = task_of(7, 1);
    consumer.needs.push_back({counter, 1});
    e.add_task(list, consumer);
    SimTask producer = task_of(8, 1);
    producer.raises.push_back({counter, 1, 0});
    e.add_task(list, producer);
    for (std::int16_t w = 0; w < workers; ++w) draw_from(e, w, list);
    if (workers == 2) {
      EXPECT_DOUBLE_EQ(e.run().end_us, 2);
      continue;
    }
    try {
      static_cast<void>(e.run());
      ADD_FAILURE() << "ended";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("gemm1 of rank 0, index 7"), std::string::npos)
          << error.what();
    }
  }
  EventEngine idle;
  idle.add_task(idle.add_list(), task_of(3, 1));
  EXPECT_THROW(static_cast<void>(idle.run()), Error);
}

struct Input {
  LayerSizes sizes;
  Topology topology;
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> ids;
};

// Each token of each rank to topk experts in turn, so that every expert gets the same.
Input even_input(std::int64_t tokens, int ranks, int experts, int topk, std::int64_t hidden,
                 std::int64_t ffn, int ranks_per_gpu = 1) {
  Input in;
  in.sizes = {.tokens = tokens,
              .hidden = hidden,
              .ffn = ffn,
              .experts = experts,
              .topk = topk,
              .ranks = ranks,
              .dtype = DType::bf16};
  in.topology = {.ranks = ranks, .ranks_per_gpu = ranks_per_gpu, .gpus_per_node = 8};
  in.tokens.assign(static_cast<std::size_t>(ranks), tokens);
  for (std::int64_t i = 0; i < tokens * ranks * topk; ++i) {
    in.ids.push_back(static_cast<std::int32_t>(i % experts));
  }
  return in;
}

Input random_input(std::uint64_t seed) {
  Rng rng(seed);
  const auto draw = [&rng](std::uint64_t low, std::uint64_t high) {
    return static_cast<std::int64_t>(low + rng.below(high - low + 1));
  };
  Input in;
  const auto ranks = static_cast<int>(draw(1, 5));
  in.sizes = {.tokens = 0,
              .hidden = 8 * draw(1, 40),
              .ffn = 8 * draw(1, 40),
              .experts = draw(1, 20),
              .topk = static_cast<int>(draw(1, 4)),
              .ranks = ranks,
              .dtype = DType::bf16};
  in.topology = {.ranks = ranks,
                 .ranks_per_gpu = rng.below(2) == 0 ? ranks : 1,
                 .gpus_per_node = static_cast<int>(draw(1, 4))};
  for (int r = 0; r < ranks; ++r) {
    in.tokens.push_back(draw(0, 300));
    for (std::int64_t i = 0; i < in.tokens.back() * in.sizes.topk; ++i) {
      in.ids.push_back(
          static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(in.sizes.experts) + 1)) -
          1);
    }
  }
  return in;
}

EventRun run_of(const Hardware& hw, const Input& in, const CudaSchedule& s, bool backward) {
  return run_events(hw, in.sizes, in.topology, s, in.tokens, in.ids, backward);
}

Scorer scorer_of(const Hardware& hw, const Input& in) {
  return {hw, load_of(in.sizes, in.topology, in.tokens, in.ids)};
}

Hardware free_hardware() {  // nothing costs anything until a test says so
  Hardware hw = load_hardware(kH200);
  for (const char* name :
       {"narrow_share", "epilogue_rows_us", "epilogue_swiglu_us", "epilogue_wgrad_us",
        "epilogue_f32_us", "epilogue_main_us", "launch_us", "grid_launch_us", "signal_us",
        "chunk_us", "plan_base_us", "plan_pair_us", "scale_out_us"}) {
    figure(hw, name) = 0;
  }
  hw.sms = 100;
  hw.mma_step_us = 1e-6;
  hw.tail_share = 1;
  hw.hbm_rate = hw.warp_read_rate = hw.warp_store_rate = hw.warp_reduce_rate = 1e9;
  hw.link_push = hw.link_pull = RateCurve({{1, 1e9}});
  hw.link_short_share = 1;
  return hw;
}

TEST(EventRunAgainstClosedForm, GemmOnly) {
  Hardware hw = free_hardware();
  hw.mma_step_us = 1;
  // 10 experts of 512 rows: gemm1 10 m tiles x 20, two waves of 16; gemm2 8 x 20, of 10, the
  // second one not full.
  const Input in = even_input(5120, 1, 10, 1, 1024, 640);
  for (const char* text : {"fusion=split", "fusion=fused,blocks=2"}) {
    const CudaSchedule s = parse_cuda_schedule(text);
    EXPECT_NEAR(run_of(hw, in, s, false).forward_us, 32 + 20, 0.1) << text;
    EXPECT_NEAR(scorer_of(hw, in).forward(s).total(), 32 + 20, 0.1) << text;
  }
}

TEST(EventRunAgainstClosedForm, OneTile) {
  Hardware hw = free_hardware();
  hw.mma_step_us = 1;
  hw.epilogue_rows_us = 3;
  hw.epilogue_swiglu_us = 5;
  const Input in = even_input(256, 1, 1, 1, 128, 64);
  const CudaSchedule s;
  EXPECT_NEAR(run_of(hw, in, s, false).forward_us, 2 + 5 + 1 + 3, 0.01);
  EXPECT_NEAR(scorer_of(hw, in).forward(s).total(), 2 + 5 + 1 + 3, 0.01);
}

TEST(EventRunAgainstClosedForm, LinkOnly) {
  Hardware hw = free_hardware();
  hw.link_push = hw.link_pull = RateCurve({{64, 1e5}});
  const Input in = even_input(8192, 2, 8, 1, 1024, 64);
  const double once = 4096.0 * 2048 / 1e5;  // half of the rows, in each direction
  for (const char* text : {"blocks=16", "blocks=16,dispatch=pull", "blocks=16,combine=pull",
                           "blocks=16,payload=choice", "fusion=fused,blocks=16"}) {
    const CudaSchedule s = parse_cuda_schedule(text);
    EXPECT_NEAR(run_of(hw, in, s, false).forward_us / (2 * once), 1, 0.02) << text;
    EXPECT_NEAR(scorer_of(hw, in).forward(s).total() / (2 * once), 1, 0.02) << text;
  }
}

// Rows arrive in the order in which tiles use them, so products hide all of the link's time but the
// first rows'; split, the two add up.
TEST(EventRunAgainstClosedForm, PerfectOverlap) {
  Hardware hw = free_hardware();
  hw.mma_step_us = 1;
  hw.link_push = RateCurve({{16, 1e5}});
  const Input in = even_input(20480, 2, 40, 1, 1024, 640);
  const double link = 10240.0 * 2048 / 1e5;
  const double products = 10.0 * 80 / 100 * 16;
  const CudaSchedule fused = parse_cuda_schedule("fusion=fused,blocks=2,chunk=16");
  std::vector<StageTime> stages;
  static_cast<void>(scorer_of(hw, in).forward(fused, &stages));
  const double closed = stages.at(1).parts.total();
  const EventRun run = run_of(hw, in, fused, false);
  double first_kernel = 0;
  for (const TraceEvent& e : run.trace.events) {
    if (e.kind == TraceKind::task && e.role == Role::gemm1) {
      first_kernel = std::max(first_kernel, static_cast<double>(e.end_ns) / 1e3);
    }
  }
  EXPECT_LT(std::max(link, products), first_kernel);
  EXPECT_NEAR(first_kernel / closed, 1, 0.08);
  EXPECT_LT(first_kernel, 0.75 * (link + products));
}

TEST(EventRun, ComesNearTheClosedFormOnARealLayer) {
  const Hardware hw = load_hardware(kH200);
  const Routing routing = make_routing(parse_routing("uniform"), 2, 4096, 128, 8, 0, 3, 0);
  for (const int per_gpu : {1, 2}) {
    Input in = even_input(2048, 2, 128, 8, 2048, 768, per_gpu);
    in.tokens = routing.tokens_per_rank;
    in.ids = routing.topk_ids;
    for (const char* text :
         {"blocks=16", "blocks=16,payload=choice,combine=pull", "fusion=fused,blocks=16"}) {
      const CudaSchedule s = parse_cuda_schedule(text);
      const EventRun run = run_of(hw, in, s, true);
      const Scorer scorer = scorer_of(hw, in);
      EXPECT_NEAR(run.forward_us / scorer.forward(s).total(), 1, 0.15) << text << per_gpu;
      EXPECT_NEAR(run.backward_us / scorer.backward(s).total(), 1, 0.15) << text << per_gpu;
    }
  }
}

using Lane = std::tuple<int, int, int>;

void expect_sound(const EventRun& run, const Input& in, const std::string& what) {
  std::map<Lane, std::int64_t> last;
  std::map<Lane, std::vector<std::pair<std::int64_t, std::int64_t>>> spans;
  std::int64_t flops = 0;
  for (const TraceEvent& e : run.trace.events) {
    ASSERT_LE(0, e.start_ns) << what;
    ASSERT_LE(e.start_ns, e.end_ns) << what;
    ASSERT_TRUE(e.rank >= 0 && e.rank < in.sizes.ranks) << what;
    if (e.kind == TraceKind::operation) continue;
    spans[{e.rank, e.worker, e.unit}].emplace_back(e.start_ns, e.end_ns);
    flops += e.flops;
  }
  for (auto& [lane, all] : spans) {
    std::sort(all.begin(), all.end());
    for (std::size_t i = 1; i < all.size(); ++i) {
      ASSERT_LE(all[i - 1].second, all[i].first + 1) << what;
    }
  }
  std::int64_t rows = 0;
  for (const std::int32_t id : in.ids) rows += id >= 0 ? 1 : 0;
  // Weight gradients count whole tiles of 128 columns.
  const std::int64_t exact = 18 * rows * in.sizes.hidden * in.sizes.ffn;
  EXPECT_GE(flops, exact) << what;
  if (in.sizes.hidden % 128 == 0 && in.sizes.ffn % 128 == 0) {
    EXPECT_EQ(flops, exact) << what;
  }
}

TEST(EventRun, RandomLayersEndOnEveryLegalScheduleAndTheirRecordsAreSound) {
  const Hardware hw = load_hardware(kH200);
  int runs = 0;
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    const Input in = random_input(seed);
    const CudaSchedule s = sample_cuda_schedule(2, seed, 16, true);
    const std::string what = "seed " + std::to_string(seed) + ", " + to_string(s);
    const Scorer scorer = scorer_of(hw, in);
    if (const auto reason = why_illegal(s, scorer.load().sizes, scorer.limits())) {
      EXPECT_THROW(static_cast<void>(run_of(hw, in, s, true)), Error) << *reason;
      continue;
    }
    ++runs;
    const EventRun run = run_of(hw, in, s, true);
    EXPECT_GT(run.forward_us, 0) << what;
    EXPECT_GT(run.backward_us, 0) << what;
    expect_sound(run, in, what);
    const EventRun again = run_of(hw, in, s, true);
    EXPECT_EQ(again.forward_us, run.forward_us);
    EXPECT_EQ(again.trace.events.size(), run.trace.events.size());
  }
  EXPECT_GT(runs, 60);
}

TEST(EventRun, EveryRoleLeavesRecordsAndThePictureIsDrawn) {
  const Hardware hw = load_hardware(kH200);
  const Input in = even_input(512, 2, 8, 2, 256, 128);
  const auto roles = [&](const char* text) {
    const EventRun run = run_of(hw, in, parse_cuda_schedule(text), true);
    expect_sound(run, in, text);
    std::set<Role> found;
    for (const TraceEvent& e : run.trace.events) {
      if (e.kind == TraceKind::task) found.insert(e.role);
    }
    TimelineInfo info;
    info.title = "simulated";
    info.num_ranks = 2;
    const std::string picture = trace_svg(run.trace, info);
    EXPECT_NE(picture.find("class=\"lane"), std::string::npos);
    EXPECT_FALSE(trace_json(run.trace, info)["traceEvents"].empty());
    return found;
  };
  const std::set<Role> all{Role::send,   Role::fanout,       Role::gemm1,  Role::gemm2,
                           Role::dgrad2, Role::d_activation, Role::dgrad1, Role::wgrad2,
                           Role::wgrad1, Role::reduce};
  EXPECT_EQ(roles("blocks=4"), all);
  EXPECT_EQ(roles("fusion=fused,blocks=4"), all);
}

TEST(EventRun, WhatCannotBeSimulatedIsRefused) {
  const Hardware hw = load_hardware(kH200);
  const Input in = even_input(64, 2, 8, 2, 256, 128);
  const auto refused = [&](const Input& input, const char* text, const char* part) {
    try {
      static_cast<void>(run_of(hw, input, parse_cuda_schedule(text), false));
      ADD_FAILURE() << "ran";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused(in, "sms=200", "sms is 200");
  refused(even_input(4, 65, 65, 1, 64, 64), "", "65 ranks");
  Input short_ids = in;
  short_ids.ids.pop_back();
  refused(short_ids, "", "choices");
  Input more_ids = in;
  more_ids.ids.push_back(0);
  more_ids.ids.push_back(0);
  refused(more_ids, "", "choices");
}

}  // namespace
}  // namespace uniep::simulate
