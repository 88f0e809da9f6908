// SPDX-License-Identifier: Apache-2.0
// Schedules: text and value are one thing, whatever cannot run is refused by name, and sampling
// stays inside the legal space.
#include "uniep/schedule.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "base/error.hpp"

namespace uniep {
namespace {

void expect_refused(const std::string& text, const std::vector<std::string>& parts) {
  try {
    static_cast<void>(parse_schedule(text));
    ADD_FAILURE() << "'" << text << "' was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << part << " is not in: " << error.what();
    }
  }
}

TEST(Schedule, PrintsAndParsesBack) {
  EXPECT_EQ(parse_schedule(""), Schedule{});
  EXPECT_EQ(parse_schedule(to_string(Schedule{})), Schedule{});
  for (std::uint64_t i = 0; i < 500; ++i) {
    const Schedule schedule = sample_schedule(3, i);
    EXPECT_EQ(parse_schedule(to_string(schedule)), schedule) << to_string(schedule);
  }
}

TEST(Schedule, EveryKeySetsItsOwnValue) {
  const Schedule s = parse_schedule(
      "fusion=split,payload=choice,direction=pull,tile_m=24,tile_n=192,expert_order=rotated,"
      "destination_order=ascending,wgrad=after,workers=7,comm_workers=3,chunk=5");
  EXPECT_EQ(s.fusion, Fusion::split);
  EXPECT_EQ(s.payload, Payload::choice);
  EXPECT_EQ(s.direction, Direction::pull);
  EXPECT_EQ(s.tile_m, 24);
  EXPECT_EQ(s.tile_n, 192);
  EXPECT_EQ(s.expert_order, ExpertOrder::rotated);
  EXPECT_EQ(s.destination_order, DestinationOrder::ascending);
  EXPECT_EQ(s.wgrad, WgradOrder::after);
  EXPECT_EQ(s.workers, 7);
  EXPECT_EQ(s.comm_workers, 3);
  EXPECT_EQ(s.chunk, 5);
  EXPECT_EQ(parse_schedule("chunk=9", s).tile_m, 24) << "the base is kept";
  EXPECT_EQ(parse_schedule("chunk=9", s).chunk, 9);
}

TEST(Schedule, HashFollowsTheText) {
  std::set<std::string> texts;
  std::set<std::uint64_t> hashes;
  for (std::uint64_t i = 0; i < 2000; ++i) {
    const Schedule schedule = sample_schedule(5, i);
    texts.insert(to_string(schedule));
    hashes.insert(hash(schedule));
    EXPECT_EQ(hash(schedule), hash(parse_schedule(to_string(schedule))));
  }
  EXPECT_EQ(hashes.size(), texts.size());
  EXPECT_GT(texts.size(), 1000U) << "the walk visits many points";
}

TEST(Schedule, UnknownKeysAreRefusedWithTheKnownOnes) {
  expect_refused("warp=1", {"'warp'", "fusion", "payload", "tile_m", "comm_workers", "chunk"});
  expect_refused("Fusion=split", {"'Fusion'"});
  expect_refused("=1", {"''"});
}

TEST(Schedule, RepeatedOrShapelessItemsAreRefused) {
  expect_refused("tile_m=8,tile_m=16", {"'tile_m'", "twice"});
  expect_refused("tile_m", {"'tile_m'", "key=value"});
  expect_refused(",", {"''", "key=value"});
  expect_refused("tile_m=8,", {"''", "key=value"});
  expect_refused("tile_m=8,,chunk=1", {"''", "key=value"});
}

TEST(Schedule, BadWordsAreRefusedWithTheValidOnes) {
  expect_refused("fusion=both", {"fusion", "'both'", "split", "fused"});
  expect_refused("payload=", {"payload", "''", "choice", "rank"});
  expect_refused("direction=Push", {"direction", "'Push'", "push", "pull"});
  expect_refused("expert_order=random", {"expert_order", "'random'", "ascending", "rotated"});
  expect_refused("destination_order=0", {"destination_order", "'0'", "ascending", "rotated"});
  expect_refused("wgrad=interleaved", {"wgrad", "'interleaved'", "filling", "after"});
}

TEST(Schedule, BadNumbersAreRefused) {
  for (const char* key : {"tile_m", "tile_n", "workers", "comm_workers", "chunk"}) {
    for (const char* value : {"", "x", "8x", " 8", "+8", "8.0", "99999999999", "0x10"}) {
      const std::string text = std::string(key) + "=" + value;
      expect_refused(text, {key, std::string("'") + value + "'", "whole number"});
    }
  }
}

TEST(Schedule, NumbersOutOfRangeAreRefusedWithTheRange) {
  expect_refused("tile_m=0", {"tile_m is 0", "8 to 512", "multiple of 8"});
  expect_refused("tile_m=12", {"tile_m is 12"});
  expect_refused("tile_m=520", {"tile_m is 520"});
  expect_refused("tile_n=32", {"tile_n is 32", "64 to 1024", "multiple of 64"});
  expect_refused("tile_n=96", {"tile_n is 96"});
  expect_refused("tile_n=1088", {"tile_n is 1088"});
  expect_refused("workers=0", {"workers is 0", "1 to 256"});
  expect_refused("workers=257", {"workers is 257"});
  expect_refused("workers=-1", {"workers is -1"});
  expect_refused("comm_workers=-1", {"comm_workers is -1", "0 to 255"});
  expect_refused("chunk=0", {"chunk is 0", "1 to 4096"});
  expect_refused("chunk=4097", {"chunk is 4097"});
}

TEST(Schedule, SomeoneMustBeLeftToMultiply) {
  expect_refused("workers=2,comm_workers=2", {"comm_workers is 2", "workers = 2"});
  expect_refused("comm_workers=1", {"comm_workers is 1", "workers = 1"});
  EXPECT_NO_THROW(static_cast<void>(parse_schedule("workers=2,comm_workers=1")));
}

TEST(Schedule, SamplesAreValidRepeatableAndReachEveryValue) {
  std::set<std::string> seen;
  for (std::uint64_t i = 0; i < 3000; ++i) {
    const Schedule schedule = sample_schedule(11, i);
    EXPECT_NO_THROW(validate(schedule)) << to_string(schedule);
    EXPECT_EQ(schedule, sample_schedule(11, i));
    std::string text = to_string(schedule) + ",";
    for (std::size_t comma = text.find(','); comma != std::string::npos; comma = text.find(',')) {
      seen.insert(text.substr(0, comma));
      text = text.substr(comma + 1);
    }
  }
  for (const char* item : {"fusion=split",
                           "fusion=fused",
                           "payload=choice",
                           "payload=rank",
                           "direction=push",
                           "direction=pull",
                           "expert_order=ascending",
                           "expert_order=rotated",
                           "destination_order=ascending",
                           "destination_order=rotated",
                           "wgrad=filling",
                           "wgrad=after",
                           "tile_m=8",
                           "tile_m=192",
                           "tile_n=64",
                           "tile_n=192",
                           "workers=1",
                           "workers=3",
                           "comm_workers=0",
                           "comm_workers=2",
                           "chunk=1",
                           "chunk=64"}) {
    EXPECT_TRUE(seen.contains(item)) << item;
  }
  EXPECT_NE(sample_schedule(11, 0), sample_schedule(12, 0));
}

}  // namespace
}  // namespace uniep
