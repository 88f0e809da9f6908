// SPDX-License-Identifier: Apache-2.0
#include "uniep/trace.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/trace_ring.hpp"

namespace uniep::test {
namespace {

TraceEvent numbered(int number) {
  TraceEvent event;
  event.index = number;
  return event;
}

TEST(TraceRing, KeepsTheLastRecordsOldestFirstAndCountsTheRest) {
  for (const int capacity : {1, 2, 5, 8}) {
    const int kept = capacity == 5 ? 8 : capacity;
    for (int written = 0; written <= 3 * kept; ++written) {
      SCOPED_TRACE(written);
      TraceRing ring(capacity);
      for (int i = 0; i < written; ++i) ring.record(numbered(i));
      Trace trace;
      trace.events.push_back(numbered(-7));
      trace.dropped = 3;
      ring.append_to(trace);
      const int lost = std::max(0, written - kept);
      EXPECT_EQ(trace.dropped, 3 + lost);
      ASSERT_EQ(trace.events.size(), static_cast<std::size_t>(1 + written - lost));
      EXPECT_EQ(trace.events[0].index, -7);
      for (int i = lost; i < written; ++i) {
        EXPECT_EQ(trace.events[static_cast<std::size_t>(1 + i - lost)].index, i);
      }
    }
  }
}

TEST(TraceRing, StartsAnewWhenCleared) {
  TraceRing ring(4);
  for (int i = 0; i < 6; ++i) ring.record(numbered(i));
  ring.clear();
  ring.record(numbered(9));
  Trace trace;
  ring.append_to(trace);
  EXPECT_EQ(trace.dropped, 0);
  ASSERT_EQ(trace.events.size(), 1U);
  EXPECT_EQ(trace.events[0].index, 9);
}

// Names are the keys of files and the words of messages: each its own, none left out.
template <typename Enum>
void expect_distinct_names(Enum last) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(last); ++i) names.insert(to_string(static_cast<Enum>(i)));
  EXPECT_EQ(names.size(), static_cast<std::size_t>(last) + 1);
  EXPECT_FALSE(names.contains("unknown"));
  EXPECT_STREQ(to_string(static_cast<Enum>(static_cast<int>(last) + 1)), "unknown");
}

TEST(Trace, EveryRoleKindPassAndSignalHasItsOwnName) {
  expect_distinct_names(Role::none);
  expect_distinct_names(TraceKind::operation);
  expect_distinct_names(Pass::backward);
  expect_distinct_names(Signal::phase_done);
}

}  // namespace
}  // namespace uniep::test
