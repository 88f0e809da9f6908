// SPDX-License-Identifier: Apache-2.0
// Ranks that fail, are late or never come: every rank ends with a sentence, recovery gives the
// exact bits back, and nobody waits for what he does not need. Faults are placed by the hook that
// runs before every task; order is read from events, never from a clock.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "layer_support.hpp"

namespace uniep::test {
namespace {

constexpr auto kNever = std::chrono::hours(24);  // ends no test: another event must
// Where the bound itself must end a wait: longer than a loaded machine keeps a ready thread
// waiting.
constexpr auto kSoon = std::chrono::seconds(1);

// An event that threads wait for. await() gives up after a minute, so that a failure is a failed
// expectation and not a test run that hangs.
class Event {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    is_set_ = true;
    changed_.notify_all();
  }
  bool await() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::minutes(1), [this] { return is_set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_set_ = false;
};

Schedule schedule_of(const std::string& text) { return parse_schedule(text); }

const std::vector<std::string> kSchedules{
    "workers=2",
    "workers=1,direction=pull",
    "workers=2,comm_workers=1,payload=choice,tile_m=8",
    "workers=2,direction=pull,payload=choice,wgrad=after",
    "fusion=split,workers=2",
    "fusion=split,workers=1,direction=pull",
};

template <typename Failure>
void expect_world(const std::optional<Failure>& failure, std::size_t rank,
                  const std::string& part = "") {
  ASSERT_TRUE(failure.has_value()) << "rank " << rank << " succeeded";
  EXPECT_EQ(failure->code, ErrorCode::world) << failure->text;
  EXPECT_NE(failure->text.find(part), std::string::npos)
      << part << " is not in rank " << rank << "'s: " << failure->text;
}

// A fault in any role of one rank ends all; after recovery the bits are exact.
TEST(LostPeer, InAnyRoleEndsEveryRankAndRecoversExactly) {
  const Case data = random_case({.tokens = 40, .hidden = 24, .ffn = 72}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  for (const std::string& text : kSchedules) {
    std::atomic<int> fault{-1};
    Ranks<float> ranks(data, {.num_ranks = 3,
                              .schedule = schedule_of(text),
                              .wait_bound = kNever,
                              .before_task = [&fault](const TaskInfo& task) {
                                if (task.rank == 1 && static_cast<int>(task.role) == fault.load()) {
                                  throw Error(ErrorCode::world, "rank 1 lost its memory");
                                }
                              }});
    Step<float> step(data, ranks.placement());
    expect_equal(data, expected, ranks.forward_backward(step), "before, " + text);
    for (int role = 0; role <= static_cast<int>(Role::reduce); ++role) {
      SCOPED_TRACE(text + ", a fault in " + to_string(static_cast<Role>(role)));
      fault = role;
      // A fault in the last task of an operation ends ranks that are done with the next one.
      std::atomic<bool> reached{false};
      const auto failures = ranks.each([&](cpu::RankLayer<float>& layer, int rank) {
        for (int i = 0; i < 2; ++i) {
          step.forward(layer, rank);
          step.backward(layer, rank);
        }
        if (rank == 1) reached = true;
      });
      if (reached) continue;  // the schedule has no task of this role
      for (std::size_t rank = 0; rank < 3; ++rank) {
        expect_world(failures[rank], rank, "rank 1 lost its memory");
      }
      fault = -1;
      ranks.recover();
      expect_equal(data, expected, ranks.forward_backward(step), "after recovery");
      if (HasFailure()) return;
    }
  }
}

// A rank that never calls: the others' bounded waits expire and name it.
TEST(LostPeer, WhoNeverComesIsNamedByEveryOther) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  for (const std::string& text : kSchedules) {
    Ranks<float> ranks(data, {.num_ranks = 4, .schedule = schedule_of(text), .wait_bound = kSoon});
    Step<float> step(data, ranks.placement());
    const auto failures = ranks.each([&](cpu::RankLayer<float>& layer, int rank) {
      if (rank != 2) step.forward(layer, rank);
    });
    EXPECT_FALSE(failures[2].has_value());
    for (const std::size_t rank : {0U, 1U, 3U}) {
      expect_world(failures[rank], rank,
                   "stage forward, role plan, for rank 2: expected 1, seen 0");
    }
  }
}

// A rank that hangs in the middle of an operation, where only row signals can tell.
TEST(LostPeer, WhoHangsInTheMiddleIsNamedAndTheGroupRecovers) {
  const Case data = random_case({.tokens = 24}, DType::bf16);
  const CaseResult expected = run_case_sequential(data, true);
  for (const std::string& text : kSchedules) {
    SCOPED_TRACE(text);
    std::atomic<bool> hang{true};
    std::atomic<int> gone{0};
    Event others_gone;
    Ranks<Bf16> ranks(data, {.num_ranks = 3,
                             .schedule = schedule_of(text),
                             .wait_bound = kSoon,
                             .before_task = [&](const TaskInfo& task) {
                               if (hang && task.rank == 1 && task.role == Role::send) {
                                 EXPECT_TRUE(others_gone.await());
                               }
                             }});
    Step<Bf16> step(data, ranks.placement());
    const auto failures = ranks.each([&](cpu::RankLayer<Bf16>& layer, int rank) {
      try {
        step.forward(layer, rank);
      } catch (const Error&) {
        if (rank != 1 && gone.fetch_add(1) == 1) others_gone.set();
        throw;
      }
    });
    for (const std::size_t rank : {0U, 1U, 2U}) {
      expect_world(failures[rank], rank, "for rank 1");
      expect_world(failures[rank], rank, "expected 1, seen 0");
    }
    hang = false;
    // Recovery is bounded too: where the machine is busy for that long it is repeated.
    const auto recovered = [&] {
      const auto late = ranks.each([](cpu::RankLayer<Bf16>& layer, int) { layer.recover(); });
      return std::none_of(late.begin(), late.end(), [](const auto& f) { return f.has_value(); });
    };
    bool ok = false;
    for (int i = 0; i < 20 && !ok; ++i) ok = recovered();
    ASSERT_TRUE(ok);
  }
}

TEST(FailedGroup, StaysFailedUntilAllRecover) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  for (const int num_ranks : {1, 3}) {
    std::atomic<bool> fault{true};
    Ranks<float> ranks(data, {.num_ranks = num_ranks,
                              .wait_bound = kNever,
                              .before_task = [&fault](const TaskInfo& task) {
                                if (fault && task.rank == 0) {
                                  throw Error(ErrorCode::world, "broken");
                                }
                              }});
    Step<float> step(data, ranks.placement());
    const auto forward = [&](cpu::RankLayer<float>& layer, int rank) { step.forward(layer, rank); };
    const auto first = ranks.each(forward);
    fault = false;
    for (int i = 0; i < 3; ++i) {
      const auto failures = ranks.each(forward);
      for (std::size_t rank = 0; rank < failures.size(); ++rank) {
        expect_world(failures[rank], rank, "recover");
      }
    }
    ranks.recover();
    expect_equal(data, expected, ranks.forward_backward(step), "after recovery");
  }
}

TEST(FailedGroup, RecoversAgainAndAgain) {
  const Case data = random_case({.tokens = 24}, DType::bf16);
  const CaseResult expected = run_case_sequential(data, true);
  std::atomic<int> victim{0};
  Ranks<Bf16> ranks(data, {.num_ranks = 4,
                           .schedule = schedule_of("workers=2"),
                           .wait_bound = kNever,
                           .before_task = [&victim](const TaskInfo& task) {
                             if (task.rank == victim && task.role == Role::fanout) {
                               throw Error(ErrorCode::world, "broken");
                             }
                           }});
  Step<Bf16> step(data, ranks.placement());
  for (int round = 0; round < 12; ++round) {
    victim = round % 4;
    const auto failures =
        ranks.each([&](cpu::RankLayer<Bf16>& layer, int rank) { step.forward(layer, rank); });
    for (std::size_t rank = 0; rank < 4; ++rank) expect_world(failures[rank], rank, "broken");
    victim = -1;
    ranks.recover();
    for (int i = 0; i < round % 3; ++i) {
      expect_equal(data, expected, ranks.forward_backward(step),
                   "round " + fmt::format("{}", round));
    }
  }
}

TEST(FailedGroup, RecoversBetweenForwardAndBackward) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  std::atomic<bool> fault{false};
  Ranks<float> ranks(
      data, {.num_ranks = 3, .wait_bound = kNever, .before_task = [&fault](const TaskInfo& task) {
               if (fault && task.rank == 2 && task.role == Role::dgrad1) {
                 throw Error(ErrorCode::world, "broken");
               }
             }});
  Step<float> step(data, ranks.placement());
  const auto backward = [&](cpu::RankLayer<float>& layer, int rank) { step.backward(layer, rank); };
  ranks.all([&](cpu::RankLayer<float>& layer, int rank) { step.forward(layer, rank); });
  fault = true;
  const auto failures = ranks.each(backward);
  for (std::size_t rank = 0; rank < 3; ++rank) expect_world(failures[rank], rank, "broken");
  fault = false;
  ranks.recover();
  ranks.all(backward);  // of the forward that was saved before the failure
  expect_equal(data, expected, step.result(), "backward after recovery");
}

// --- bad input on one rank ---

TEST(BadInput, OnOneRankEndsAllAndIsNamedThere) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  using Change = std::function<void(cpu::ForwardInput<float>&)>;
  std::vector<std::int32_t> bad_ids(16, 0);
  bad_ids[5] = 8;
  const std::vector<std::pair<std::string, Change>> changes{
      {"topk_ids of token 2, choice 1 is 8", [&](auto& in) { in.topk_ids = bad_ids; }},
      {"x has", [](auto& in) { in.x = in.x.first(in.x.size() - 1); }},
      {"out has", [](auto& in) { in.out = in.out.first(0); }},
      {"topk_weights has", [](auto& in) { in.topk_weights = in.topk_weights.first(3); }},
      {"w1 has", [](auto& in) { in.w1 = in.w1.first(7); }},
      {"w2 has", [](auto& in) { in.w2 = in.w2.first(7); }},
      {"ffn is 0", [](auto& in) { in.ffn = 0; }},
  };
  Ranks<float> ranks(data, {.num_ranks = 3, .wait_bound = kNever});
  Step<float> step(data, ranks.placement());
  for (const auto& [part, change] : changes) {
    SCOPED_TRACE(part);
    const auto failures = ranks.each([&](cpu::RankLayer<float>& layer, int rank) {
      auto input = step.forward_input(rank);
      if (rank == 1) change(input);
      static_cast<void>(layer.forward(input));
    });
    ASSERT_TRUE(failures[1].has_value());
    EXPECT_EQ(failures[1]->code, ErrorCode::invalid_argument);
    EXPECT_NE(failures[1]->text.find(part), std::string::npos) << failures[1]->text;
    for (const std::size_t rank : {0U, 2U}) expect_world(failures[rank], rank, part);
    ranks.recover();
    expect_equal(data, expected, ranks.forward_backward(step), "after recovery");
  }
}

TEST(BadInput, MoreTokensThanTheGroupHoldsAreRefusedWithTheLimit) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  Ranks<float> ranks(data, {.num_ranks = 2, .max_tokens = 11, .wait_bound = kNever});
  Step<float> step(data, ranks.placement());
  const auto failures =
      ranks.each([&](cpu::RankLayer<float>& layer, int rank) { step.forward(layer, rank); });
  // Both are refused, and the second to be so may learn it from the first.
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure.has_value());
    EXPECT_NE(failure->text.find("12 tokens; max_tokens_per_rank is 11"), std::string::npos)
        << failure->text;
  }
}

TEST(BadInput, DifferentOperationsAreNoticedBeforeAnyRowMoves) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  std::atomic<int> tasks{0};
  std::atomic<bool> count{false};
  Ranks<float> ranks(data, {.num_ranks = 2,
                            .wait_bound = kNever,
                            .before_task = [&](const TaskInfo&) { tasks += count ? 1 : 0; }});
  Step<float> step(data, ranks.placement());
  ranks.forward_backward(step);
  count = true;
  const auto failures = ranks.each([&](cpu::RankLayer<float>& layer, int rank) {
    if (rank == 0) {
      step.forward(layer, rank);
    } else {
      step.backward(layer, rank);
    }
  });
  for (const auto& failure : failures) {
    ASSERT_TRUE(failure.has_value());
    EXPECT_NE(failure->text.find("same order"), std::string::npos) << failure->text;
  }
  EXPECT_EQ(tasks.load(), 0);
}

TEST(BadInput, AWrongSavedForwardIsRefused) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  Ranks<float> ranks(data, {.num_ranks = 2, .wait_bound = kNever});
  Step<float> step(data, ranks.placement());
  ranks.all([&](cpu::RankLayer<float>& layer, int rank) { step.forward(layer, rank); });
  const auto failures = ranks.each([&](cpu::RankLayer<float>& layer, int rank) {
    layer.backward(step.saved(0), step.backward_input(rank));
  });
  ASSERT_TRUE(failures[1].has_value());
  EXPECT_NE(failures[1]->text.find("rank 0 of 2"), std::string::npos) << failures[1]->text;
  ASSERT_TRUE(failures[0].has_value()) << "its peer went away";
}

TEST(BadInput, ARunReportsTheCauseNotItsConsequence) {
  Case data = random_case({.tokens = 24}, DType::f32);
  data.topk_ids[40] = 8;  // of the last rank
  for (int i = 0; i < 20; ++i) {
    try {
      static_cast<void>(run(data, 3, {}));
      ADD_FAILURE() << "an id beyond the experts was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    }
  }
}

TEST(Memory, AHeapThatDoesNotFitIsAWorldErrorWithTheBytes) {
  const Case data = random_case({.tokens = 8}, DType::f32);
  try {
    const Ranks<float> ranks(data, {.num_ranks = 2, .max_tokens = std::int64_t{1} << 29});
    ADD_FAILURE() << "the machine has more memory than this test thought of";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::world);
    EXPECT_NE(std::string(error.what()).find("bytes"), std::string::npos) << error.what();
  }
}

// --- a late rank holds up what needs it, and no more ---

// All rows of rank 1 go to rank 0's first expert, which has the first tile; rank 0's own go to its
// second. Rank 1 does not send before rank 0 has multiplied all tiles of the second expert.
void expect_ready_tiles_run(const std::string& text, bool backward) {
  SCOPED_TRACE(text);
  Case data =
      random_case({.tokens = 80, .hidden = 24, .ffn = 136, .experts = 4, .topk = 1}, DType::f32);
  for (std::size_t i = 0; i < 80; ++i) data.topk_ids[i] = i < 40 ? 1 : 0;
  const CaseResult expected = run_case_sequential(data, true);
  const Schedule schedule = schedule_of(text);
  const auto num_columns = (data.ffn + schedule.tile_n - 1) / schedule.tile_n;
  const auto num_tiles = (40 + schedule.tile_m - 1) / schedule.tile_m;
  const Role product = backward ? Role::dgrad2 : Role::gemm1;
  Event multiplied;
  std::atomic<std::int64_t> left{num_columns * num_tiles};
  std::atomic<bool> armed{false};
  Ranks<float> ranks(
      data, {.num_ranks = 2, .schedule = schedule, .before_task = [&](const TaskInfo& task) {
               if (!armed) return;
               if (task.rank == 1 && task.role == Role::send) {
                 EXPECT_TRUE(multiplied.await()) << "rank 0 waits for rows it does not need";
               }
               // Tiles of the second expert follow those of the first.
               if (task.rank == 0 && task.role == product && task.index >= num_tiles &&
                   left.fetch_sub(1) == 1) {
                 multiplied.set();
               }
             }});
  Step<float> step(data, ranks.placement());
  armed = !backward;
  ranks.all([&](cpu::RankLayer<float>& layer, int rank) { step.forward(layer, rank); });
  armed = backward;
  ranks.all([&](cpu::RankLayer<float>& layer, int rank) { step.backward(layer, rank); });
  expect_equal(data, expected, step.result(), "with a late rank");
}

TEST(LateRank, DoesNotStopTilesWhoseRowsAreThere) {
  for (const bool backward : {false, true}) {
    for (const char* text :
         {"workers=1", "workers=2", "workers=3,comm_workers=1", "workers=2,payload=choice,tile_m=8",
          "workers=1,direction=pull", "workers=2,direction=pull,payload=choice,tile_m=16",
          "workers=2,tile_n=64,chunk=3"}) {
      expect_ready_tiles_run(text, backward);
      if (HasFailure()) return;
    }
  }
}

// In a split schedule the same late rank does stop them: stages follow one another.
TEST(LateRank, StopsTheNextStageOfASplitSchedule) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  RunOptions options;
  options.num_ranks = 2;
  options.schedule = schedule_of("fusion=split,workers=2");
  Trace trace;
  options.trace = &trace;
  static_cast<void>(run_case(data, options));
  std::map<int, std::int64_t> last_fanout;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == TraceKind::task && event.role == Role::fanout) {
      auto& last = last_fanout[event.rank];
      last = std::max(last, event.end_ns);
    }
  }
  for (const TraceEvent& event : trace.events) {
    if (event.kind == TraceKind::task && event.role == Role::gemm1) {
      EXPECT_GE(event.start_ns, last_fanout[event.rank]);
    }
  }
}

// Four ranks, fused: the trace shows products that start while rows are still being dispatched. The
// hook makes the order certain: the last rank holds its last rows back until somebody multiplies.
TEST(Overlap, ProductsStartBeforeDispatchEnds) {
  const Case data = random_case({.tokens = 256, .hidden = 24, .ffn = 40}, DType::bf16);
  const CaseResult expected = run_case_sequential(data, false);
  for (const char* text : {"workers=2", "workers=2,comm_workers=1", "workers=1",
                           "workers=2,direction=pull,payload=choice"}) {
    SCOPED_TRACE(text);
    Event multiplied;
    std::array<std::array<std::atomic<bool>, 2>, 4> has_multiplied{};  // by rank and worker
    RunOptions options;
    options.num_ranks = 4;
    options.schedule = parse_schedule("tile_m=8,chunk=16", schedule_of(text));
    Trace trace;
    options.trace = &trace;
    options.before_task = [&](const TaskInfo& task) {
      // A worker's next task tells that its product is done, and in the trace.
      auto& done = has_multiplied[at(task.rank)][at(task.worker)];
      if (done) multiplied.set();
      if (task.role == Role::gemm1) done = true;
      if (task.role == Role::send && task.rank == 3 && task.index == 3) {
        EXPECT_TRUE(multiplied.await());
      }
    };
    const CaseResult result = run_case(data, options);
    EXPECT_EQ(result.out, expected.out);
    std::int64_t first_product = std::numeric_limits<std::int64_t>::max();
    std::int64_t dispatch_end = 0;
    for (const TraceEvent& event : trace.events) {
      EXPECT_LE(event.start_ns, event.end_ns);
      if (event.kind != TraceKind::task) continue;
      if (event.role == Role::gemm1) first_product = std::min(first_product, event.start_ns);
      if (event.role == Role::send) dispatch_end = std::max(dispatch_end, event.end_ns);
    }
    EXPECT_LT(first_product, dispatch_end);
  }
}

}  // namespace
}  // namespace uniep::test
