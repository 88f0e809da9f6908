// SPDX-License-Identifier: Apache-2.0
// The simulator: profiles are read strictly; closed-form cases come out as they can be worked out
// by hand; and no shape makes more work, less hardware or more distance faster.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "io/routing.hpp"
#include "simulate/hardware.hpp"
#include "simulate/load.hpp"
#include "simulate/score.hpp"

namespace uniep::simulate {
namespace {

const std::string kFolder = UNIEP_SOURCE_DIR "/hw/";

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  try {
    static_cast<void>(parse_hardware(text, "profile 'x'"));
    ADD_FAILURE() << "accepted: " << text.substr(0, 200);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    const std::string what = error.what();
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    for (const std::string& part : parts) {
      EXPECT_NE(what.find(part), std::string::npos) << part << " is not in: " << what;
    }
  }
}

TEST(Hardware, ProfilesOfTheRepositoryAreReadWithTheirSources) {
  for (const char* name : {"h200.json", "h100.json"}) {
    const Hardware hw = load_hardware(kFolder + name);
    EXPECT_EQ(hw.sms, 132);
    EXPECT_EQ(hw.sources.size(), figure_names().size() + 2) << "and two curves";
  }
  EXPECT_GT(load_hardware(kFolder + "h200.json").hbm_rate,
            load_hardware(kFolder + "h100.json").hbm_rate);
}

TEST(Hardware, EveryMistakeIsNamedInASentence) {
  const auto good = nlohmann::json::parse(text_of(kFolder + "h200.json"));
  const auto with = [&good](auto change) {
    nlohmann::json changed = good;
    change(changed);
    return changed.dump();
  };
  const auto set = [&](const char* figure, const nlohmann::json& value) {
    return with([&](nlohmann::json& j) { j["figures"][figure]["value"] = value; });
  };
  expect_refused("", {"profile 'x'", "no JSON"});
  expect_refused("{", {"no JSON"});
  expect_refused("[]", {"no hardware profile", "uniep_hardware = 1"});
  expect_refused(with([](auto& j) { j["uniep_hardware"] = 2; }),
                 {"uniep_hardware is 2", "reads 1"});
  expect_refused(with([](auto& j) { j["extra"] = 1; }), {"'extra'", "name and figures"});
  expect_refused(with([](auto& j) { j["name"] = ""; }), {"name must"});
  expect_refused(with([](auto& j) { j["figures"].erase("sms"); }), {"sms is missing", "hbm_rate"});
  expect_refused(with([](auto& j) { j["figures"]["smz"] = j["figures"]["sms"]; }),
                 {"'smz' is unknown", "sms"});
  expect_refused(with([](auto& j) { j["figures"]["sms"].erase("source"); }), {"sms", "a source"});
  expect_refused(with([](auto& j) { j["figures"]["sms"]["source"] = "heard"; }),
                 {"source of sms is 'heard'", "measured: "});
  expect_refused(set("sms", 131.5), {"sms is 131.5", "whole number from 2 to 1024"});
  expect_refused(set("hbm_rate", 0), {"hbm_rate is 0", "from 1"});
  expect_refused(set("hbm_rate", "fast"), {"hbm_rate is \"fast\""});
  expect_refused(set("tail_share", 1.5), {"tail_share is 1.5", "0 to 1"});
  expect_refused(set("link_push", nlohmann::json::array()), {"link_push is []", "1 to 64 pairs"});
  expect_refused(set("link_push", {{8, 2.0}, {4, 3.0}}), {"link_push", "warps rising"});
  expect_refused(set("link_push", {{4, 3.0}, {8, 2.0}}), {"link_push", "not falling"});
  std::string twice = good.dump();
  twice.insert(1, "\"name\":\"first\",");
  expect_refused(twice, {"'name' twice"});
  EXPECT_THROW(static_cast<void>(load_hardware("/nonexistent.json")), Error);
}

TEST(Hardware, CurvesAreStraightBetweenTheirPoints) {
  const RateCurve curve({{4, 100}, {8, 200}, {16, 240}});
  EXPECT_DOUBLE_EQ(curve.at(0), 0);
  EXPECT_DOUBLE_EQ(curve.at(2), 50);
  EXPECT_DOUBLE_EQ(curve.at(8), 200);
  EXPECT_DOUBLE_EQ(curve.at(12), 220);
  EXPECT_DOUBLE_EQ(curve.at(1000), 240);
}

// Round figures, so that what comes out can be worked out by hand; whatever is not asked about
// costs nothing.
Hardware round_hardware() {
  Hardware hw = load_hardware(kFolder + "h200.json");
  for (const char* name :
       {"narrow_share", "epilogue_rows_us", "epilogue_swiglu_us", "epilogue_wgrad_us",
        "epilogue_f32_us", "epilogue_main_us", "launch_us", "grid_launch_us", "signal_us",
        "chunk_us", "plan_base_us", "plan_pair_us", "scale_out_us"}) {
    figure(hw, name) = 0;
  }
  hw.sms = 100;
  hw.mma_step_us = 1;
  hw.tail_share = 1;
  hw.hbm_rate = hw.warp_read_rate = hw.warp_store_rate = hw.warp_reduce_rate = 1e9;
  hw.link_push = RateCurve({{100, 1e5}, {200, 2e5}});
  hw.link_pull = RateCurve({{100, 1e5}, {200, 2e5}});
  hw.link_short_share = 1;
  hw.scale_out_rate = 5e4;
  return hw;
}

LayerSizes sizes_of(std::int64_t tokens, int ranks) {
  return {.tokens = tokens,
          .hidden = 1024,
          .ffn = 640,
          .experts = 4 * ranks,
          .topk = 1,
          .ranks = ranks,
          .dtype = DType::bf16};
}

TEST(ClosedForm, OneTile) {
  Hardware hw = round_hardware();
  hw.epilogue_rows_us = 3;
  const Groups groups = groups_of(std::vector<std::int64_t>{256});
  const Parts p = gemm_time(hw, gemm_work(hw, groups, Output::rows, 128, 640), 100);
  EXPECT_DOUBLE_EQ(p.total(), 10 * 1 + 3);  // 640 / 64 steps and the epilogue
  EXPECT_DOUBLE_EQ(p.tensor, 13.0 / 100);   // the other 99 SMs idle
  EXPECT_DOUBLE_EQ(p.tail, 13.0 * 99 / 100);
}

TEST(ClosedForm, GemmOnlyInWholeWaves) {
  const Hardware hw = round_hardware();
  // 10 x 20 tiles on 100 SMs: two waves of 16 steps.
  const Groups groups = groups_of(std::vector<std::int64_t>{256 * 10, 256 * 10});
  const GemmWork work = gemm_work(hw, groups, Output::rows, 1280, 1024);
  EXPECT_NEAR(gemm_time(hw, work, 100).total(), 32, 1e-9);
  EXPECT_NEAR(gemm_time(hw, work, 100).tensor, 32, 1e-9);
  // On 99 SMs a third wave takes the two tiles left.
  EXPECT_NEAR(gemm_time(hw, work, 99).total(), 48, 1e-9);
  // Weight gradients: tiles of 128 x 256, 40 steps each.
  const GemmWork wgrad = gemm_work(hw, groups, Output::wgrad_f32, 1280, 1280);
  EXPECT_NEAR(gemm_time(hw, wgrad, 100).total(), 40, 1e-9);
}

TEST(ClosedForm, ManyBytesAndFewProductsAreMemory) {
  Hardware hw = round_hardware();
  hw.hbm_rate = 1e3;
  const Groups groups = groups_of(std::vector<std::int64_t>{64});
  const Parts p = gemm_time(hw, gemm_work(hw, groups, Output::rows, 128, 64), 100);
  EXPECT_DOUBLE_EQ(p.total(), (128 * 64 * 2 + 64 * (64 + 128) * 2) / 1e3);
  EXPECT_EQ(limit_of(p), "hbm");
}

// Without products what is left of a layer is the way of its rows.
TEST(ClosedForm, LinkOnly) {
  Hardware hw = round_hardware();
  hw.mma_step_us = 1e-6;
  LayerSizes sizes = sizes_of(8000, 2);
  const Load load = uniform_load(sizes, {.ranks = 2, .ranks_per_gpu = 1, .gpus_per_node = 8});
  const double bytes = 4000.0 * 1024 * 2;  // half of the rows have to cross, there and back
  for (const char* text : {"blocks=32", "blocks=32,payload=choice", "blocks=32,dispatch=pull",
                           "blocks=32,combine=pull", "blocks=32,fusion=fused,push_warps=10"}) {
    const Parts p = Scorer(hw, load).forward(parse_cuda_schedule(text));
    EXPECT_NEAR(p.link / (2 * bytes / 2e5), 1, 0.01) << text;
    EXPECT_NEAR(p.total() / p.link, 1, 0.02) << text;
    EXPECT_EQ(limit_of(p), "link") << text;
  }
  // Half the warps that the link needs move half as much.
  const auto dispatch_link = [&](const char* text) {
    std::vector<StageTime> stages;
    static_cast<void>(Scorer(hw, load).forward(parse_cuda_schedule(text), &stages));
    return stages.at(1).parts.link;
  };
  EXPECT_NEAR(dispatch_link("blocks=10,push_warps=10,chunk=1"), bytes / 1e5, 1);
  EXPECT_NEAR(dispatch_link("blocks=20,push_warps=10,chunk=1"), bytes / 2e5, 1);
  EXPECT_NEAR(dispatch_link("blocks=30,push_warps=10,chunk=1"), bytes / 2e5, 1);
}

TEST(ClosedForm, ScaleOutLinksAreTheSlowOnes) {
  Hardware hw = round_hardware();
  hw.mma_step_us = 1e-6;
  const LayerSizes sizes = sizes_of(8000, 16);
  const Load load = uniform_load(sizes, {.ranks = 16, .ranks_per_gpu = 1, .gpus_per_node = 8});
  const Parts p = Scorer(hw, load).forward(parse_cuda_schedule("blocks=32"));
  EXPECT_NEAR(p.link / (2 * 4000.0 * 1024 * 2 / 5e4), 1, 0.01);  // half of all leave the node
  const Load one = uniform_load(sizes, {.ranks = 16, .ranks_per_gpu = 1, .gpus_per_node = 16});
  EXPECT_LT(Scorer(hw, one).forward(parse_cuda_schedule("blocks=32")).link, p.link / 2);
}

// One rank: rows are copied by two SMs while the others multiply, and nothing else is waited for.
TEST(ClosedForm, PerfectOverlap) {
  Hardware hw = round_hardware();
  hw.warp_store_rate = 2e4;  // 24 warps: 4.8e5 bytes in a microsecond
  hw.tail_share = 0;
  LayerSizes sizes = sizes_of(51200, 1);
  sizes.experts = 4;
  const Load load = uniform_load(sizes, {.ranks = 1});
  const double copy_us = 51200.0 * 2048 / 4.8e5;
  std::vector<StageTime> stages;
  CudaSchedule s = parse_cuda_schedule("fusion=fused,blocks=2,push_warps=11,chunk=1");
  const Scorer scorer(hw, load);
  static_cast<void>(scorer.forward(s, &stages));
  const Parts fused = stages.at(1).parts;
  const double products = scorer.product(Gemm::gemm1).total();
  ASSERT_GT(products, copy_us);
  // Two of a hundred SMs give up the time of the copies, which all share in the end.
  const double pushing = copy_us * 12 / 11;
  EXPECT_NEAR(fused.total(), products + 0.02 * pushing, products * 2e-3);
  EXPECT_EQ(limit_of(fused), "tensor");
}

TEST(Score, PartsOfTheStagesAddUp) {
  const Hardware hw = load_hardware(kFolder + "h200.json");
  const Load load = uniform_load(sizes_of(4096, 8), {.ranks = 8}, 1.3);
  const Scorer scorer(hw, load);
  for (std::uint64_t i = 0; i < 64; ++i) {
    const CudaSchedule s = sample_cuda_schedule(1, i, 16, true);
    std::vector<StageTime> forward, backward;
    const double all = scorer.forward(s, &forward).total() + scorer.backward(s, &backward).total();
    double sum = 0;
    for (const auto* stages : {&forward, &backward}) {
      for (const StageTime& stage : *stages) {
        for (const auto& [name, part] : kParts) {
          EXPECT_GE(stage.parts.*part, 0) << stage.name << " " << name << " " << to_string(s);
        }
        sum += stage.parts.total();
      }
    }
    EXPECT_NEAR(sum, all, 1e-6 * all);
    EXPECT_DOUBLE_EQ(all, scorer.layer(s).total());
    EXPECT_EQ(forward.size(), s.fusion == Fusion::fused ? 3U : 5U);
  }
  EXPECT_THROW(
      Scorer(hw, uniform_load(
                     {.tokens = 1, .hidden = 8, .ffn = 8, .experts = 1, .dtype = DType::f32}, {})),
      Error);
}

struct RandomPoint {
  LayerSizes sizes;
  Topology topology;
  double skew = 1;
  CudaSchedule schedule;
};

RandomPoint random_point(std::uint64_t seed) {
  Rng rng(seed);
  const auto draw = [&rng](std::uint64_t low, std::uint64_t high) {
    return static_cast<std::int64_t>(low + rng.below(high - low + 1));
  };
  RandomPoint p;
  p.topology.ranks = static_cast<int>(std::int64_t{1} << draw(0, 10));
  p.topology.ranks_per_gpu = p.topology.ranks <= 8 && rng.below(4) == 0 ? p.topology.ranks : 1;
  p.topology.gpus_per_node = static_cast<int>(std::int64_t{1} << draw(0, 5));
  p.sizes.ranks = p.topology.ranks;
  p.sizes.tokens = draw(0, 16384);
  p.sizes.hidden = 64 * draw(1, 128);
  p.sizes.ffn = 64 * draw(1, 200);
  p.sizes.experts = draw(1, 512);
  p.sizes.topk = static_cast<int>(draw(1, 10));
  p.skew = 1 + rng.uniform01();
  p.schedule = sample_cuda_schedule(seed, static_cast<std::uint64_t>(draw(0, 1000)), 16, true);
  return p;
}

TEST(Score, EveryRandomPointHasAFiniteTime) {
  const Hardware hw = load_hardware(kFolder + "h200.json");
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    const RandomPoint p = random_point(seed);
    const Parts t = Scorer(hw, uniform_load(p.sizes, p.topology, p.skew)).layer(p.schedule);
    for (const auto& [name, part] : kParts) {
      EXPECT_TRUE(std::isfinite(t.*part) && t.*part >= 0) << name << " of seed " << seed;
    }
    EXPECT_GT(t.latency, 0);
  }
}

TEST(Score, WorseHardwareIsNeverFaster) {
  const Hardware good = load_hardware(kFolder + "h200.json");
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const RandomPoint p = random_point(seed);
    const Load load = uniform_load(p.sizes, p.topology, p.skew);
    const double before = Scorer(good, load).layer(p.schedule).total();
    for (const std::string& name : figure_names()) {
      if (name == "sms" || name == "shared_bytes" || name == "gpus_per_node") continue;
      if (name == "narrow_share") continue;  // how tiles differ, not how quick they are
      const bool is_rate = name.find("rate") != std::string::npos || name == "link_short_share";
      Hardware worse = good;
      double& value = figure(worse, name);
      value = is_rate ? value / 1.7 : value * 1.2;
      EXPECT_GE(Scorer(worse, load).layer(p.schedule).total(), before * (1 - 1e-9))
          << name << ", seed " << seed << ", " << to_string(p.schedule);
    }
    for (RateCurve Hardware::*curve : {&Hardware::link_push, &Hardware::link_pull}) {
      Hardware worse = good;
      auto points = (worse.*curve).points();
      for (auto& [warps, rate] : points) rate /= 1.7;
      worse.*curve = RateCurve(points);
      EXPECT_GE(Scorer(worse, load).layer(p.schedule).total(), before * (1 - 1e-9));
    }
  }
}

TEST(Score, MoreWorkIsNeverFaster) {
  const Hardware hw = load_hardware(kFolder + "h200.json");
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    const RandomPoint p = random_point(seed);
    const auto time = [&](const LayerSizes& sizes, double skew) {
      return Scorer(hw, uniform_load(sizes, p.topology, skew)).layer(p.schedule).total();
    };
    const double before = time(p.sizes, p.skew);
    LayerSizes more = p.sizes;
    more.tokens *= 2;
    EXPECT_GE(time(more, p.skew), before * 0.999) << "tokens, seed " << seed;
    more = p.sizes;
    more.hidden *= 2;
    EXPECT_GE(time(more, p.skew), before) << "hidden, seed " << seed;
    more = p.sizes;
    more.ffn *= 2;
    EXPECT_GE(time(more, p.skew), before) << "ffn, seed " << seed;
  }
}

TEST(Load, UniformIsWhatUniformRoutingsCountTo) {
  for (const int ranks : {1, 2, 8}) {
    LayerSizes sizes{.tokens = 4096,
                     .hidden = 64,
                     .ffn = 64,
                     .experts = 128,
                     .topk = 8,
                     .ranks = ranks,
                     .dtype = DType::bf16};
    const Topology topology{.ranks = ranks, .ranks_per_gpu = 1, .gpus_per_node = 4};
    const Routing routing =
        make_routing(parse_routing("uniform"), ranks, sizes.tokens * ranks, 128, 8, 0, 7, 0);
    const Load counted = load_of(sizes, topology, routing.tokens_per_rank, routing.topk_ids);
    const Load expected = uniform_load(sizes, topology);
    for (std::size_t way = 0; way < kWays; ++way) {
      EXPECT_NEAR(counted.choices[way], expected.choices[way], 0.05 * expected.choices[way]);
      EXPECT_NEAR(counted.rows[way], expected.rows[way], 0.05 * expected.rows[way]);
      EXPECT_NEAR(counted.in_rows[way], expected.in_rows[way], 0.08 * expected.in_rows[way]);
    }
    EXPECT_NEAR(counted.groups.rows, expected.groups.rows, 0.05 * expected.groups.rows);
    EXPECT_NEAR(counted.groups.tiles, expected.groups.tiles, 0.15 * expected.groups.tiles);
    EXPECT_EQ(skew_class(counted.skew), "even");
  }
}

// One row for each (token, rank) saves what is known of k = 8: 75 % of the bytes at 2 ranks, 34 %
// at 8 and 4 % at 64.
TEST(Load, ARowForEachRankSavesTheKnownShares) {
  for (const auto& [ranks, saved] : {std::pair{2, 0.75}, std::pair{8, 0.34}, std::pair{64, 0.05}}) {
    LayerSizes sizes = sizes_of(1000, ranks);
    sizes.experts = 4096;
    sizes.topk = 8;
    const Load load = uniform_load(sizes, {.ranks = ranks, .gpus_per_node = ranks});
    EXPECT_NEAR(1 - load.rows[up] / load.choices[up], saved, 0.01) << ranks;
  }
}

TEST(Load, SkewIsOfTheBusiestRank) {
  const LayerSizes sizes = sizes_of(6, 2);
  const std::vector<std::int64_t> tokens{6, 6};
  std::vector<std::int32_t> ids(12, 0);
  ids[0] = 7;  // of rank 1
  ids[11] = -1;
  const Load load = load_of(sizes, {.ranks = 2}, tokens, ids);
  EXPECT_DOUBLE_EQ(load.groups.rows, 10);
  EXPECT_DOUBLE_EQ(load.skew, 10.0 * 2 / 11);
  EXPECT_EQ(skew_class(load.skew), "strong");
  EXPECT_DOUBLE_EQ(load.in_choices[up], 5);
  EXPECT_THROW(static_cast<void>(load_of(sizes, {.ranks = 3}, tokens, ids)), Error);
  ids[3] = 8;
  EXPECT_THROW(static_cast<void>(load_of(sizes, {.ranks = 2}, tokens, ids)), Error);
}

}  // namespace
}  // namespace uniep::simulate
