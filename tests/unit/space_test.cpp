// SPDX-License-Identifier: Apache-2.0
// The schedule space: every refusal names the value and what would be valid, enumeration holds
// legal points only, each once, and everything that sampling reaches is judged as the layer does.
#include "schedule/space.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/rng.hpp"

namespace uniep {
namespace {

const LayerSizes kQwen{.tokens = 4096,
                       .hidden = 2048,
                       .ffn = 768,
                       .experts = 128,
                       .topk = 8,
                       .ranks = 2,
                       .dtype = DType::bf16};

void expect_reason(const std::optional<std::string>& reason,
                   const std::vector<std::string>& parts) {
  ASSERT_TRUE(reason.has_value()) << parts.front();
  for (const std::string& part : parts) {
    EXPECT_NE(reason->find(part), std::string::npos) << part << " is not in: " << *reason;
  }
}

void expect_gpu_reason(const char* schedule, const LayerSizes& sizes, const GpuLimits& limits,
                       const std::vector<std::string>& parts) {
  expect_reason(why_illegal(parse_cuda_schedule(schedule), sizes, limits), parts);
}

TEST(ScheduleSpace, DefaultsAreLegal) {
  EXPECT_EQ(why_illegal(Schedule{}, kQwen), std::nullopt);
  EXPECT_EQ(why_illegal(CudaSchedule{}, kQwen, {}), std::nullopt);
  EXPECT_EQ(default_blocks({}), 16);
  EXPECT_EQ(default_blocks({.ranks_per_gpu = 16}), 8);
}

TEST(ScheduleSpace, ResidencyIsNamed) {
  const GpuLimits eight{.ranks_per_gpu = 8};
  expect_gpu_reason("blocks=17", kQwen, eight,
                    {"blocks is 17", "8 ranks", "136", "132", "1 to 16"});
  EXPECT_EQ(why_illegal(parse_cuda_schedule("blocks=16"), kQwen, eight), std::nullopt);
  expect_gpu_reason("sms=140", kQwen, {}, {"sms is 140", "132"});
}

TEST(ScheduleSpace, MoversMustStartBeforeThoseWhoWaitForThem) {
  expect_gpu_reason("fusion=fused,blocks=20,sms=16", kQwen, {},
                    {"blocks is 20", "16 blocks of a rank", "wait for rows", "0 to 16"});
  EXPECT_EQ(why_illegal(parse_cuda_schedule("fusion=fused,blocks=16,sms=16"), kQwen, {}),
            std::nullopt);
  // An odd number takes the cluster's other block as well.
  expect_gpu_reason("fusion=fused,blocks=15,sms=14", kQwen, {}, {"14 blocks of a rank"});
  Schedule cpu;
  cpu.workers = cpu.comm_workers = 2;
  expect_reason(why_illegal(cpu, kQwen), {"comm_workers is 2", "workers = 2", "multiply"});
}

TEST(ScheduleSpace, SharedMemoryAndAlignmentAreNamed) {
  expect_gpu_reason("", kQwen, {.shared_bytes = 166912}, {"166912", "232448", "shared memory"});
  LayerSizes odd = kQwen;
  odd.hidden = 2044;
  expect_gpu_reason("", odd, {}, {"hidden is 2044", "multiple of 8"});
  odd.dtype = DType::f32;
  EXPECT_EQ(why_illegal(CudaSchedule{}, odd, {}), std::nullopt);
  expect_gpu_reason("fusion=fused", odd, {}, {"fusion=fused", "bf16", "split"});
}

TEST(ScheduleSpace, CountsThatShareAWordAreBounded) {
  LayerSizes large = kQwen;
  large.ranks = 1024;
  large.tokens = 8192;
  expect_gpu_reason("fusion=fused,chunk=1", large, {}, {"chunk is 1", "67108864", "larger"});
  LayerSizes wide = kQwen;
  wide.hidden = wide.ffn = std::int64_t{1} << 30;
  Schedule cpu;
  cpu.tile_m = 8;
  cpu.tile_n = 64;
  expect_reason(why_illegal(cpu, wide), {"tile_m = 8", "weight gradient", "2147483647"});
}

TEST(ScheduleSpace, TooManyRanksOnAGpuAreNamed) {
  expect_gpu_reason("fusion=fused,blocks=4", kQwen, {.ranks_per_gpu = 9}, {"9 ranks", "1 to 8"});
  expect_gpu_reason("blocks=1", kQwen, {.ranks_per_gpu = 17}, {"17 ranks", "1 to 16"});
}

template <typename S, typename Reason>
void expect_all_legal_once(const std::vector<S>& all, Reason reason) {
  std::set<std::string> texts;
  for (const S& s : all) {
    EXPECT_EQ(reason(s), std::nullopt) << to_string(s);
    EXPECT_TRUE(texts.insert(to_string(s)).second) << to_string(s) << " twice";
  }
}

TEST(ScheduleSpace, EnumerationHoldsLegalPointsOnceForRandomShapes) {
  Rng rng(11);
  for (int i = 0; i < 12; ++i) {
    LayerSizes sizes;
    sizes.tokens = static_cast<std::int64_t>(rng.below(9000));
    sizes.hidden = 8 * static_cast<std::int64_t>(1 + rng.below(900));
    sizes.ffn = 8 * static_cast<std::int64_t>(1 + rng.below(900));
    sizes.experts = static_cast<std::int64_t>(1 + rng.below(400));
    sizes.topk = static_cast<int>(1 + rng.below(16));
    sizes.ranks = static_cast<int>(1 + rng.below(64));
    sizes.dtype = rng.below(4) == 0 ? DType::f32 : DType::bf16;
    const GpuLimits limits{.ranks_per_gpu = static_cast<int>(1 + rng.below(16))};
    const auto gpu = legal_cuda_schedules(sizes, limits, {});
    EXPECT_FALSE(gpu.empty());
    expect_all_legal_once(gpu, [&](const auto& s) { return why_illegal(s, sizes, limits); });
    Schedule base;
    base.workers = static_cast<std::int32_t>(1 + rng.below(5));
    const auto cpu = legal_schedules(sizes, base);
    EXPECT_FALSE(cpu.empty());
    expect_all_legal_once(cpu, [&](const auto& s) { return why_illegal(s, sizes); });
    for (const Schedule& s : cpu) EXPECT_EQ(s.workers, base.workers);
  }
}

TEST(ScheduleSpace, EnumerationReachesEveryWayOfMoving) {
  std::set<std::string> ways;
  for (const CudaSchedule& s : legal_cuda_schedules(kQwen, {.ranks_per_gpu = 2}, {})) {
    const std::string text = to_string(s);
    ways.insert(text.substr(0, text.find(",blocks")));
  }
  EXPECT_EQ(ways.size(), 8U + 2U);  // split: payload, dispatch and combine; fused: payload
  LayerSizes alone = kQwen;
  alone.ranks = 1;
  for (const CudaSchedule& s : legal_cuda_schedules(alone, {}, {})) {
    EXPECT_EQ(s.dispatch, Direction::push);
    EXPECT_EQ(s.payload, Payload::rank);
  }
}

// A changed default or a new field changes these: then the version must rise, since caches hold
// schedules as text.
TEST(ScheduleSpace, TextAndHashBelongToTheVersion) {
  EXPECT_EQ(kScheduleVersion, 1);
  EXPECT_EQ(to_string(Schedule{}),
            "fusion=fused,payload=rank,direction=push,tile_m=64,tile_n=128,expert_order=ascending,"
            "destination_order=rotated,wgrad=filling,workers=1,comm_workers=0,chunk=16");
  EXPECT_EQ(kCudaScheduleVersion, 1);
  EXPECT_EQ(to_string(CudaSchedule{}),
            "fusion=split,payload=rank,dispatch=push,combine=push,blocks=0,push_warps=8,chunk=8,"
            "sms=0");
  std::set<std::uint64_t> hashes;
  const auto all = legal_cuda_schedules(kQwen, {}, {});
  for (const CudaSchedule& s : all) hashes.insert(hash(s));
  EXPECT_EQ(hashes.size(), all.size());
}

}  // namespace
}  // namespace uniep
