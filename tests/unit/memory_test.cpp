// SPDX-License-Identifier: Apache-2.0
// Symmetric memory, signals, bounded waits, abort and recovery, without a layer on top. Order of
// events is established by signals and joins; bounds are only ever waited out, never measured.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "layout/heap_layout.hpp"
#include "memory/signal.hpp"
#include "memory/symmetric_heap.hpp"
#include "memory/wait.hpp"

namespace uniep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// What a body ends with: the text of its world error, or nothing.
template <typename Body>
std::optional<std::string> world_error(Body body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::world) << error.what();
    return error.what();
  }
  return std::nullopt;
}

void expect_has(const std::optional<std::string>& text, const std::vector<std::string>& parts) {
  ASSERT_TRUE(text.has_value()) << "no world error; expected one with " << parts[0];
  for (const std::string& part : parts) {
    EXPECT_NE(text->find(part), std::string::npos) << part << " is not in: " << *text;
  }
}

TEST(HostHeap, EveryRankHasItsOwnAlignedZeroedPart) {
  const auto heap = make_host_heap({.num_ranks = 3, .bytes_per_rank = 1000});
  EXPECT_EQ(heap->num_ranks(), 3);
  EXPECT_GE(heap->bytes_per_rank(), 1000U);
  for (int rank = 0; rank < 3; ++rank) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(heap->map(rank));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes) % 64, 0U);
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(bytes[i], 0);
  }
  for (int rank = 0; rank < 3; ++rank) {
    std::memset(heap->map(rank), rank + 1, heap->bytes_per_rank());
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(heap->map(rank));
    for (std::size_t i = 0; i < heap->bytes_per_rank(); ++i) ASSERT_EQ(bytes[i], rank + 1);
  }
}

TEST(HostHeap, MemoryThatIsNotThereIsAWorldErrorWithTheBytes) {
  expect_has(
      world_error([] {
        static_cast<void>(make_host_heap({.num_ranks = 4, .bytes_per_rank = std::size_t{1} << 50}));
      }),
      {std::to_string((std::size_t{1} << 52) + SymmetricHeap::kControlBytes), "bytes"});
  expect_has(world_error([] {
               static_cast<void>(make_host_heap(
                   {.num_ranks = 2, .bytes_per_rank = std::numeric_limits<std::size_t>::max()}));
             }),
             {"2 ranks", "address space"});
  expect_has(world_error([] {
               static_cast<void>(
                   make_host_heap({.num_ranks = 1024, .bytes_per_rank = std::size_t{1} << 62}));
             }),
             {"1024 ranks", "address space"});
  EXPECT_THROW(static_cast<void>(make_host_heap({.num_ranks = 0, .bytes_per_rank = 64})), Error);
}

TEST(HeapLayout, RegionsDoNotOverlapAndHoldWhatTheyMust) {
  for (std::uint64_t i = 0; i < 64; ++i) {
    const Schedule schedule = sample_schedule(1, i);
    const HeapShape shape{.num_ranks = 3,
                          .num_experts = 5,
                          .topk = 2,
                          .hidden = 24,
                          .max_tokens = static_cast<std::int64_t>(i % 4) * 7,
                          .element_bytes = 2};
    const HeapLayout layout(shape, schedule);
    std::int64_t end = 0;
    for (std::size_t r = 0; r < static_cast<std::size_t>(Region::count); ++r) {
      const auto region = static_cast<Region>(r);
      EXPECT_EQ(layout.offset(region) % kRegionAlignment, 0);
      EXPECT_GE(layout.offset(region), end);
      end = layout.offset(region) + layout.bytes(region);
    }
    EXPECT_GE(layout.bytes_per_rank(), end);
    EXPECT_EQ(layout.bytes(Region::staging), shape.max_tokens * 2 * 24 * 2);
    EXPECT_EQ(layout.bytes(Region::splits), 5 * 8);
  }
}

TEST(HeapLayout, BytesBeyond63BitsAreRefused) {
  const HeapShape shape{.num_ranks = 8,
                        .num_experts = 8,
                        .topk = 8,
                        .hidden = std::int64_t{1} << 32,
                        .max_tokens = std::int64_t{1} << 27,
                        .element_bytes = 4};
  try {
    const HeapLayout layout(shape, Schedule{});
    ADD_FAILURE() << "accepted " << layout.bytes_per_rank();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("2^63"), std::string::npos);
  }
}

// Two sides hand one buffer back and forth; each must see exactly what the other wrote last.
TEST(Signal, CarriesEpochsAndWhatWasWrittenBefore) {
  GroupState state(2, seconds(60));
  std::uint64_t filled = 0;
  std::uint64_t emptied = 0;
  std::vector<std::uint64_t> buffer(16, 0);
  constexpr std::uint64_t kRounds = 2000;
  std::optional<std::string> failure;
  std::jthread consumer([&] {
    failure = world_error([&] {
      for (std::uint64_t epoch = 1; epoch <= kRounds; ++epoch) {
        wait_at_least(state, &filled, epoch, {.rank = 1});
        for (const std::uint64_t value : buffer) ASSERT_EQ(value, epoch);
        raise(&emptied, epoch);
      }
    });
  });
  for (std::uint64_t epoch = 1; epoch <= kRounds; ++epoch) {
    wait_at_least(state, &emptied, epoch - 1, {.rank = 0});
    for (std::uint64_t& value : buffer) value = epoch;
    raise(&filled, epoch);
  }
  consumer.join();
  EXPECT_EQ(failure, std::nullopt);
}

TEST(Signal, LaterEpochsSatisfyEarlierWaits) {
  GroupState state(1, milliseconds(1));
  std::uint64_t word = 0;
  wait_at_least(state, &word, 0, {});
  for (const std::uint64_t value :
       {std::uint64_t{0xFFFF}, std::uint64_t{0x10000}, std::uint64_t{0x7FFFFFFF},
        std::uint64_t{0x80000000}, std::uint64_t{0xFFFFFFFF}, std::uint64_t{0x100000000}}) {
    raise(&word, value);
    EXPECT_EQ(world_error([&] { wait_at_least(state, &word, value, {}); }), std::nullopt);
    EXPECT_EQ(world_error([&] { wait_at_least(state, &word, value - 1, {}); }), std::nullopt);
  }
  EXPECT_TRUE(world_error([&] { wait_at_least(state, &word, 0x100000001U, {}); }).has_value());
}

TEST(Wait, ExpiryNamesWhoWaitedForWhatAndWhatWasSeen) {
  GroupState state(3, milliseconds(20));
  std::uint64_t word = 4;
  const WaitSite site{
      .rank = 2, .stage = "gemm1", .role = "fanout", .expert = 17, .tile = 33, .peer = 1};
  expect_has(world_error([&] { wait_at_least(state, &word, 5, site); }),
             {"rank 2 waited", "stage gemm1", "role fanout", "rank 1", "expert 17", "tile 33",
              "expected 5", "seen 4"});
  EXPECT_NE(state.abort_word.load(), 0U) << "an expired wait poisons the group";
}

TEST(Wait, WhatDoesNotApplyIsNotReported) {
  GroupState state(1, milliseconds(1));
  std::uint64_t word = 0;
  const auto text = world_error([&] { wait_at_least(state, &word, 1, {.stage = "phase"}); });
  ASSERT_TRUE(text.has_value());
  for (const char* part : {"expert", "tile", "for rank"}) {
    EXPECT_EQ(text->find(part), std::string::npos) << *text;
  }
}

TEST(Wait, AbortWakesEveryWaiterWithTheFirstReport) {
  // A bound that no test run lives to see: only the abort can end these waits.
  GroupState state(5, std::chrono::hours(24));
  std::uint64_t word = 0;
  std::atomic<int> waiting{0};
  std::vector<std::optional<std::string>> errors(4);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        errors[static_cast<std::size_t>(rank)] = world_error([&] {
          waiting.fetch_add(1);
          wait_at_least(state, &word, 1, {.rank = rank});
        });
      });
    }
    while (waiting.load() < 4) std::this_thread::yield();
    abort_group(state, 4, "rank 4 ran out of memory");
    abort_group(state, 0, "a later report");
  }
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    expect_has(errors[rank], {"rank " + std::to_string(rank) + " stopped", "rank 4 ran out"});
    EXPECT_EQ(errors[rank]->find("a later report"), std::string::npos);
  }
}

TEST(Wait, ASignalThatIsThereIsNotLostToAnAbort) {
  GroupState state(2, std::chrono::hours(24));
  std::uint64_t word = 7;
  abort_group(state, 1, "gone");
  EXPECT_EQ(world_error([&] { wait_at_least(state, &word, 7, {}); }), std::nullopt);
  EXPECT_TRUE(world_error([&] { wait_at_least(state, &word, 8, {}); }).has_value());
}

TEST(Recover, AllRanksComeBackTogetherInANewGeneration) {
  constexpr int kRanks = 4;
  GroupState state(kRanks, seconds(60));
  for (std::uint64_t generation = 1; generation <= 3; ++generation) {
    abort_group(state, 1, "broken");
    std::vector<std::uint64_t> got(kRanks, 0);
    std::vector<std::uint64_t> abort_seen(kRanks, 1);
    {
      std::vector<std::jthread> threads;
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&, rank] {
          got[rank] = recover(state, static_cast<int>(rank));
          abort_seen[rank] = state.abort_word.load();
        });
      }
    }
    EXPECT_EQ(got, std::vector<std::uint64_t>(kRanks, generation));
    EXPECT_EQ(abort_seen, std::vector<std::uint64_t>(kRanks, 0));
    EXPECT_STREQ(state.report, "");
  }
}

TEST(Recover, AMissingRankIsReportedAndRecoveryCanBeTriedAgain) {
  GroupState state(3, milliseconds(30));
  abort_group(state, 0, "broken");
  std::vector<std::optional<std::string>> errors(2);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        errors[rank] =
            world_error([&] { static_cast<void>(recover(state, static_cast<int>(rank))); });
      });
    }
  }
  for (std::size_t rank = 0; rank < 2; ++rank) {
    expect_has(errors[rank], {"rank " + std::to_string(rank), "recover", "of 3 ranks"});
  }
  EXPECT_NE(state.abort_word.load(), 0U) << "the group is still broken";
  GroupState later(3, seconds(60));
  later.arrived = state.arrived;
  EXPECT_EQ(later.arrived, 0U) << "who left is not counted as present";
  std::vector<std::uint64_t> got(3, 0);
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < 3; ++rank) {
      threads.emplace_back([&, rank] { got[rank] = recover(later, static_cast<int>(rank)); });
    }
  }
  EXPECT_EQ(got, std::vector<std::uint64_t>(3, 1));
}

}  // namespace
}  // namespace uniep
