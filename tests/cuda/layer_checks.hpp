// SPDX-License-Identifier: Apache-2.0
// Checks of the split layer that need no more than one launch at a time, so that they run on a GPU
// and in emulation: every schedule and rank count against one rank bit by bit, and that against the
// CPU, bit by bit where the arithmetic is the same, within the derived bound where it is not.
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "cuda_host.hpp"
#include "io/case.hpp"
#include "layer/compare.hpp"
#include "layer/cuda/run_case.hpp"
#include "uniep/error.hpp"

namespace uniep::cuda_test {

using cuda::GemmEngine;
using cuda::SplitLayer;
using cuda::SplitSchedule;

struct LayerCase {
  std::string name;
  Case data;
};

inline LayerCase layer_case(const std::string& name, const Shape& shape, DType dtype,
                            const std::string& routing = "W0", double mask = 0, int ranks = 1,
                            std::uint64_t seed = 1) {
  return {name + (dtype == DType::bf16 ? ", bf16" : ", f32"),
          make_case(shape, dtype, parse_routing(routing), ranks, mask, seed, true)};
}

inline std::string describe(const SplitSchedule& s) {
  const auto direction = [](Direction d) { return d == Direction::push ? "push" : "pull"; };
  return std::string(s.fusion == Fusion::fused ? "fused " : "") +
         (s.payload == Payload::choice ? "choice" : "rank") + " " + direction(s.dispatch) + " " +
         direction(s.combine) + " blocks=" + std::to_string(s.blocks_per_rank) +
         " push_warps=" + std::to_string(s.push_warps) + " chunk=" + std::to_string(s.chunk);
}

// Every payload and both directions each way, with other block, warp and chunk numbers.
inline std::vector<SplitSchedule> split_schedules(int num_sms) {
  std::vector<SplitSchedule> list;
  for (const Payload payload : {Payload::rank, Payload::choice}) {
    for (const Direction dispatch : {Direction::push, Direction::pull}) {
      for (const Direction combine : {Direction::push, Direction::pull}) {
        const auto i = static_cast<int>(list.size());
        list.push_back({.payload = payload,
                        .dispatch = dispatch,
                        .combine = combine,
                        .blocks_per_rank = 1 + i % 3,
                        .push_warps = i % 4 == 0   ? 1
                                      : i % 4 == 1 ? 15
                                                   : 8,
                        .chunk = i % 3 == 0   ? 8
                                 : i % 3 == 1 ? 1
                                              : 5,
                        .num_sms = num_sms});
      }
    }
  }
  return list;
}

// Fused forwards with other block, warp and chunk numbers, on SMs that leave each rank as many
// clusters as its movers need, or more.
inline std::vector<SplitSchedule> fused_schedules(int num_ranks, bool few_sms) {
  std::vector<SplitSchedule> list;
  for (const Payload payload : {Payload::rank, Payload::choice}) {
    for (const int chunk : {1, 8, 40}) {
      const auto i = static_cast<int>(list.size());
      const int blocks = 1 + i % 4;
      const int clusters = (blocks + 1) / 2 + i % 2;
      list.push_back({.fusion = Fusion::fused,
                      .payload = payload,
                      .blocks_per_rank = blocks,
                      .push_warps = i % 3 == 0   ? 1
                                    : i % 3 == 1 ? 11
                                                 : 8,
                      .chunk = chunk,
                      .num_sms = few_sms ? 2 * clusters * num_ranks : 0});
    }
  }
  return list;
}

template <typename Body>
std::string layer_error_of(Body body) {
  try {
    body();
    return "";
  } catch (const Error& error) {
    return (error.code() == ErrorCode::world ? "world: " : "invalid: ") + std::string(error.what());
  }
}

// Empty, or the first results that are beyond the bound.
inline std::string beyond_bound(const Case& data, const CaseResult& got) {
  const auto errors = compare_with_f64(data, got, run_case_f64(data, true));
  std::string text;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    if (!(errors[i].relative <= errors[i].bound)) {
      text += std::string(" ") + kResultNames[i] + " is " + std::to_string(errors[i].relative) +
              " from f64, bound " + std::to_string(errors[i].bound);
    }
  }
  return text;
}

struct LayerLimits {
  int num_sms = 0;
  GemmEngine bf16 = GemmEngine::tensor_cores;
  bool f32_has_cpu_bits = false;  // where exp is the CPU's
  std::vector<int> ranks{1, 2, 3, 8};
  int stride = 1;  // of all rank counts and schedules only every so many
};

// One rank against the CPU, then every rank count and schedule against one rank.
inline void test_layer(Report& report, const LayerCase& c, const LayerLimits& limits) {
  const bool is_f32 = c.data.dtype == DType::f32;
  CudaRunOptions options{.num_ranks = 1,
                         .schedule = {.blocks_per_rank = 2, .num_sms = limits.num_sms},
                         .gemm = is_f32 ? GemmEngine::fma : limits.bf16,
                         .backward = true};
  CaseResult alone;
  std::string wrong;
  wrong += layer_error_of([&] {
    alone = run_case_cuda(c.data, options);
    if (is_f32 && limits.f32_has_cpu_bits) {
      wrong += describe_difference(c.data, run_case_sequential(c.data, true), alone);
    } else {
      wrong += beyond_bound(c.data, alone);
    }
  });
  report.check(wrong.empty(), c.name + ", one rank against the CPU " + wrong);
  if (!wrong.empty()) return;
  int points = 0;
  int runs = 0;
  for (const int num_ranks : limits.ranks) {
    std::vector<SplitSchedule> schedules = split_schedules(limits.num_sms);
    if (!is_f32 && limits.bf16 == GemmEngine::tensor_cores) {
      const auto fused = fused_schedules(num_ranks, limits.num_sms != 0);
      schedules.insert(schedules.end(), fused.begin(), fused.end());
    }
    for (const SplitSchedule& schedule : schedules) {
      if (points++ % limits.stride != 0) continue;
      options.num_ranks = num_ranks;
      options.schedule = schedule;
      options.repeats = 1 + runs % 2;
      CaseResult result;
      const std::string told = layer_error_of([&] { result = run_case_cuda(c.data, options); });
      const std::string differs = told.empty() ? describe_difference(c.data, alone, result) : told;
      if (!differs.empty()) {
        wrong += " R=" + std::to_string(num_ranks) + " " + describe(schedule) + ": " + differs;
      }
      ++runs;
    }
  }
  report.check(wrong.empty(),
               c.name + ", " + std::to_string(runs) + " runs equal one rank" + wrong);
}

// A layer over virtual ranks with the tensors of some cases of one shape.
struct LayerWorld {
  LayerWorld(const Case& data, int num_ranks, const SplitSchedule& split, GemmEngine gemm,
             std::chrono::nanoseconds bound)
      : placement(make_contiguous_placement(static_cast<int>(data.num_experts), num_ranks)),
        shape(layer_shape_of(data, num_ranks, gemm)),
        schedule(split),
        memory(num_ranks, SplitLayer::bytes_per_rank(shape, schedule, placement), bound) {}
  [[nodiscard]] SplitLayer layer(int first_rank, int num_local_ranks) {
    return {memory, shape, schedule, placement, first_rank, num_local_ranks};
  }
  Placement placement;
  cuda::LayerShape shape;
  SplitSchedule schedule;
  cuda::SymmetricMemory memory;
};

// Two micro-batches in flight: F0 F1 B1 F2 B0 B2, each as if alone.
inline void test_interleaved(Report& report, GemmEngine gemm, DType dtype, int num_sms,
                             Fusion fusion = Fusion::split) {
  const Shape shape{"test", 32, 48, 6, 3, 61};
  const SplitSchedule schedule{.fusion = fusion, .blocks_per_rank = 2, .num_sms = num_sms};
  constexpr int kRanks = 3;
  std::vector<Case> cases;
  for (const std::uint64_t seed : {1, 2, 3}) {
    cases.push_back(layer_case("", shape, dtype, "zipf:1.2", 0.1, 1, seed).data);
  }
  LayerWorld world(cases[0], kRanks, schedule, gemm, std::chrono::seconds(30));
  std::string wrong;
  wrong += layer_error_of([&] {
    SplitLayer layer = world.layer(0, kRanks);
    std::vector<CaseTensors> tensors;
    for (const Case& data : cases) tensors.emplace_back(data, world.placement, true);
    std::vector<SplitLayer::Saved> saved(3);
    const auto forward = [&](std::size_t i) {
      saved[i] = layer.forward(tensors[i].forward(), nullptr);
    };
    const auto backward = [&](std::size_t i) {
      layer.backward(saved[i], tensors[i].backward(), nullptr);
    };
    forward(0), forward(1), backward(1), forward(2), backward(0), backward(2);
    for (std::size_t i = 0; i < 3; ++i) {
      layer.check(saved[i], nullptr);
      const CaseResult expected = run_case_cuda(
          cases[i], {.num_ranks = 1, .schedule = schedule, .gemm = gemm, .backward = true});
      wrong += describe_difference(cases[i], expected, tensors[i].download());
    }
    // main_grad: added once to what is there, and experts without rows left alone.
    tensors[0].set_main_grad(1.5F);
    layer.backward(saved[0], tensors[0].backward(true), nullptr);
    layer.check(saved[0], nullptr);
    CaseResult sum = run_case_cuda(
        cases[0], {.num_ranks = 1, .schedule = schedule, .gemm = gemm, .backward = true});
    for (float& value : sum.d_w1) value += 1.5F;
    for (float& value : sum.d_w2) value += 1.5F;
    wrong += describe_difference(cases[0], sum, tensors[0].download());
  });
  const char* const fused = fusion == Fusion::fused ? "fused, " : "";
  report.check(wrong.empty(),
               std::string(fused) + "interleaved micro-batches and main_grad " + wrong);
}

inline void test_layer_refusals(Report& report, int num_sms) {
  const Shape shape{"test", 32, 48, 6, 2, 20};
  const Case f32 = layer_case("", shape, DType::f32).data;
  const auto refused = [&](const std::string& want, auto body) {
    const std::string told = layer_error_of(body);
    report.check(told.find(want) != std::string::npos, "refused: " + told);
  };
  const auto run = [&](const Case& data, int num_ranks, SplitSchedule schedule,
                       GemmEngine gemm = GemmEngine::fma) {
    schedule.num_sms = num_sms;
    static_cast<void>(run_case_cuda(
        data, {.num_ranks = num_ranks, .schedule = schedule, .gemm = gemm, .backward = true}));
  };
  refused("invalid: tensor cores multiply bf16",
          [&] { run(f32, 1, {}, GemmEngine::tensor_cores); });
  Case odd = layer_case("", shape, DType::bf16).data;
  odd.hidden = 30;
  refused("invalid: hidden is 30", [&] { run(odd, 1, {}, GemmEngine::tensor_cores); });
  refused("invalid: push_warps is 16", [&] { run(f32, 1, {.push_warps = 16}); });
  refused("invalid: chunk is 0", [&] { run(f32, 1, {.chunk = 0}); });
  refused("invalid: 40 blocks per rank", [&] { run(f32, 1, {.blocks_per_rank = 40}); });
  refused("invalid: 17 ranks", [&] { run(f32, 17, {}); });
  refused("invalid: fusion=fused needs tensor cores",
          [&] { run(f32, 1, {.fusion = Fusion::fused}); });
  const Case bf16 = layer_case("", shape, DType::bf16).data;
  const auto refused_fused = [&](const std::string& want, int num_ranks, SplitSchedule schedule) {
    schedule.fusion = Fusion::fused;
    refused(want, [&] { run(bf16, num_ranks, schedule, GemmEngine::tensor_cores); });
  };
  refused_fused("invalid: fusion=fused pushes rows, and combine", 2, {.combine = Direction::pull});
  refused_fused("invalid: push_warps of fusion=fused is 12", 2, {.push_warps = 12});
  refused_fused("invalid: 9 ranks in one launch", 9, {.blocks_per_rank = 2});
  refused("resident at once", [&] { run(f32, 16, {.blocks_per_rank = 32}); });
  Case bad = f32;
  bad.topk_ids[7] = 6;
  refused("invalid: topk_ids of rank 0, token 3, choice 1 is 6", [&] { run(bad, 2, {}); });
}

}  // namespace uniep::cuda_test
