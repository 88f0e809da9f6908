// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: the bits of threads, and a rank that is killed is named by the others.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "layer_support.hpp"

namespace uniep::test {
namespace {

std::set<std::string> shared_memory_names() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    names.insert(entry.path().string());
  }
  return names;
}

RunOptions process_options(int num_ranks, const Schedule& schedule) {
  RunOptions options;
  options.num_ranks = num_ranks;
  options.schedule = schedule;
  options.backward = true;
  options.processes = true;
  return options;
}

TEST(Processes, HaveTheBitsOfThreadsAndOfOneRank) {
  const std::array<const char*, 4> routings{"zipf:1.2", "one-hot", "W4", "empty-ranks"};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* routing : routings) {
      const Case data = random_case({.tokens = 50, .hidden = 24, .ffn = 72, .experts = 10}, dtype,
                                    routing, 4, 0.1);
      const CaseResult expected = run_case_sequential(data, true);
      for (const int num_ranks : {1, 2, 4}) {
        for (std::uint64_t i = 0; i < 4; ++i) {
          const Schedule schedule = sample_schedule(3, i);
          const std::string what =
              fmt::format("{}, {} ranks, {}", routing, num_ranks, to_string(schedule));
          expect_equal(data, expected, run(data, num_ranks, schedule), "threads, " + what);
          expect_equal(data, expected, run_case(data, process_options(num_ranks, schedule)),
                       "processes, " + what);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST(Processes, TraceComesFromEveryRank) {
  const Case data = random_case({}, DType::f32);
  RunOptions options = process_options(3, {});
  Trace trace;
  options.trace = &trace;
  static_cast<void>(run_case(data, options));
  std::set<int> ranks;
  for (const TraceEvent& event : trace.events) ranks.insert(event.rank);
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2}));
}

TEST(Processes, AnErrorKeepsItsKindAndSentence) {
  const Case data = random_case({}, DType::f32);
  RunOptions options = process_options(3, {});
  options.before_task = [](const TaskInfo& task) {
    if (task.rank == 2 && task.role == Role::gemm2) {
      throw Error(ErrorCode::invalid_argument, "rank 2 was given a bad thing");
    }
  };
  try {
    static_cast<void>(run_case(data, options));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_STREQ(error.what(), "rank 2 was given a bad thing");
  }
}

// The bound of waits is an hour: only the notice of the death can end the others.
TEST(Processes, AKilledRankIsNamedAndNothingIsLeft) {
  const Case data = random_case({.tokens = 64, .hidden = 16, .ffn = 64}, DType::f32);
  const auto names = shared_memory_names();
  Rng rng(11);
  for (int round = 0; round < 50; ++round) {
    const int victim = static_cast<int>(rng.below(4));
    const auto fatal = static_cast<int>(rng.below(12));
    RunOptions options = process_options(4, sample_schedule(5, rng.below(1000)));
    options.wait_bound = std::chrono::hours(1);
    std::atomic<int> tasks{0};
    options.before_task = [&](const TaskInfo& task) {
      if (task.rank == victim && tasks.fetch_add(1) == fatal) ::kill(::getpid(), SIGKILL);
    };
    try {
      static_cast<void>(run_case(data, options));
      // A rank may have fewer tasks than that.
      continue;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::world);
      EXPECT_NE(std::string(error.what()).find(fmt::format("rank {} (process", victim)),
                std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("signal 9"), std::string::npos) << error.what();
    }
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
  }
  EXPECT_EQ(shared_memory_names(), names);
}

TEST(Processes, ARankThatLeavesQuietlyIsNamed) {
  const Case data = random_case({}, DType::f32);
  RunOptions options = process_options(2, {});
  options.wait_bound = std::chrono::hours(1);
  options.before_task = [](const TaskInfo& task) {
    if (task.rank == 1) ::_exit(7);
  };
  try {
    static_cast<void>(run_case(data, options));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 (process"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("exit code 7"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace uniep::test
