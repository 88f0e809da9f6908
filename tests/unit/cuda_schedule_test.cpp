// SPDX-License-Identifier: Apache-2.0
// Schedules of the GPU: text and value are one thing, whatever cannot run is refused by name, and
// sampling stays inside the legal space and reaches every way of moving rows.
#include "schedule/cuda_schedule.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.hpp"

namespace uniep {
namespace {

void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  try {
    static_cast<void>(parse_cuda_schedule(text));
    ADD_FAILURE() << "'" << text << "' was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << part << " is not in: " << error.what();
    }
  }
}

TEST(CudaSchedule, PrintsAndParsesBack) {
  EXPECT_EQ(parse_cuda_schedule(""), CudaSchedule{});
  EXPECT_EQ(parse_cuda_schedule(to_string(CudaSchedule{})), CudaSchedule{});
  for (std::uint64_t i = 0; i < 500; ++i) {
    const CudaSchedule schedule = sample_cuda_schedule(3, i, 16);
    EXPECT_EQ(parse_cuda_schedule(to_string(schedule)), schedule) << to_string(schedule);
    EXPECT_EQ(schedule, sample_cuda_schedule(3, i, 16));
  }
}

TEST(CudaSchedule, EveryKeySetsItsOwnValue) {
  const CudaSchedule s = parse_cuda_schedule(
      "fusion=split,payload=choice,dispatch=pull,combine=pull,blocks=3,push_warps=5,chunk=7,sms=9");
  EXPECT_EQ(s.fusion, Fusion::split);
  EXPECT_EQ(s.payload, Payload::choice);
  EXPECT_EQ(s.dispatch, Direction::pull);
  EXPECT_EQ(s.combine, Direction::pull);
  EXPECT_EQ(s.blocks, 3);
  EXPECT_EQ(s.push_warps, 5);
  EXPECT_EQ(s.chunk, 7);
  EXPECT_EQ(s.sms, 9);
  EXPECT_EQ(parse_cuda_schedule("combine=pull").dispatch, Direction::push);
}

TEST(CudaSchedule, WhatIsNotServedIsRefusedByName) {
  expect_refused("fusion=fused,dispatch=pull", {"fusion=fused", "dispatch is pull", "split"});
  expect_refused("combine=pull,fusion=fused", {"fusion=fused", "combine is pull", "split"});
  expect_refused("tile_m=64", {"'tile_m'", "dispatch", "combine", "blocks", "push_warps", "sms"});
  expect_refused("direction=push", {"'direction'"});
}

TEST(CudaSchedule, BadTextIsRefused) {
  expect_refused("blocks=4,blocks=8", {"'blocks'", "twice"});
  expect_refused("blocks", {"'blocks'", "key=value"});
  expect_refused("blocks=4,", {"''", "key=value"});
  expect_refused("fusion=both", {"fusion", "'both'", "split", "fused"});
  expect_refused("dispatch=Push", {"dispatch", "'Push'", "push", "pull"});
  for (const char* value : {"", "x", "8x", " 8", "+8", "8.0", "99999999999", "0x10"}) {
    expect_refused(std::string("chunk=") + value, {"chunk is '", value, "whole number"});
  }
}

TEST(CudaSchedule, NumbersOutOfRangeAreRefusedWithTheRange) {
  expect_refused("blocks=-1", {"blocks is -1", "0 to 32"});
  expect_refused("blocks=33", {"blocks is 33"});
  expect_refused("push_warps=0", {"push_warps is 0", "1 to 15"});
  expect_refused("push_warps=16", {"push_warps is 16"});
  expect_refused("fusion=fused,push_warps=12", {"push_warps is 12", "1 to 11"});
  expect_refused("chunk=0", {"chunk is 0", "1 to 4096"});
  expect_refused("chunk=4097", {"chunk is 4097"});
  expect_refused("sms=1", {"sms is 1", "2 to 1024", "0 for all"});
  expect_refused("sms=1025", {"sms is 1025"});
}

TEST(CudaSchedule, EightSamplesInARowHoldEveryWayOfMovingRows) {
  for (std::uint64_t first = 0; first < 16; ++first) {
    std::set<std::tuple<Payload, Direction, Direction>> ways;
    for (std::uint64_t i = first; i < first + 8; ++i) {
      const CudaSchedule s = sample_cuda_schedule(1, i, 4);
      ways.emplace(s.payload, s.dispatch, s.combine);
      EXPECT_GE(s.blocks, 1);
      EXPECT_LE(s.blocks, 4);
    }
    EXPECT_EQ(ways.size(), 8U);
  }
  EXPECT_EQ(sample_cuda_schedule(1, 5, 0).blocks, 1);
}

TEST(CudaSchedule, WhereItCanEveryOtherSampleIsFused) {
  std::set<std::tuple<Payload, Direction, Direction>> split, fused;
  for (std::uint64_t i = 0; i < 16; ++i) {
    const CudaSchedule s = sample_cuda_schedule(1, i, 4, true);
    EXPECT_EQ(parse_cuda_schedule(to_string(s)), s) << to_string(s);
    (s.fusion == Fusion::fused ? fused : split).emplace(s.payload, s.dispatch, s.combine);
  }
  EXPECT_EQ(split.size(), 8U);
  EXPECT_EQ(fused.size(), 2U);
}

}  // namespace
}  // namespace uniep
