// SPDX-License-Identifier: Apache-2.0
// Processes that find each other by a job's name: the bits of threads; ranks that do not come, do
// not agree or are killed are named by all others.
#include "uniep/job.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "cpu/group.hpp"
#include "layer_support.hpp"

namespace uniep::test {
namespace {

// How a rank's process ended: "ok", "killed", or an error's code and sentence.
using Ends = std::vector<std::string>;
using Body = std::function<void(const Job&)>;

std::string end_of(const Body& body, const Job& job) {
  try {
    body(job);
    return "ok";
  } catch (const Error& error) {
    return fmt::format("{} {}", error.code() == ErrorCode::world ? "world" : "invalid",
                       error.what());
  }
}

// Forks a process for each of `ranks` and waits for all, at most 100 s.
Ends run_job(const std::string& name, int num_ranks, const std::vector<int>& ranks,
             const Body& body) {
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (const int rank : ranks) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(100);  // a hang is a failure, not a hang of the tests
      const std::string end = end_of(body, {name, rank, num_ranks});
      static_cast<void>(!::write(ends[1], end.data(), end.size()));
      std::_Exit(0);
    }
    ::close(ends[1]);
    children.push_back(child);
    pipes.push_back(ends[0]);
  }
  Ends result;
  for (std::size_t i = 0; i < children.size(); ++i) {
    std::string text(2000, '\0');
    std::size_t length = 0;
    ssize_t count = 0;
    while ((count = ::read(pipes[i], text.data() + length, text.size() - length)) > 0) {
      length += static_cast<std::size_t>(count);
    }
    ::close(pipes[i]);
    int status = 0;
    ::waitpid(children[i], &status, 0);
    text.resize(length);
    if (WIFSIGNALED(status)) text = WTERMSIG(status) == SIGALRM ? "hang" : "killed";
    result.push_back(text);
  }
  return result;
}

Ends run_job(const std::string& name, int num_ranks, const Body& body) {
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
  return run_job(name, num_ranks, ranks, body);
}

std::string unique_name() {
  static int count = 0;
  return fmt::format("test {} {}", ::getpid(), ++count);
}

RunOptions job_options(const Job& job, const Schedule& schedule = {}) {
  RunOptions options;
  options.num_ranks = job.num_ranks;
  options.job = job;
  options.backward = true;
  options.schedule = schedule;
  return options;
}

bool equal(const CaseResult& a, const CaseResult& b) {
  return a.out == b.out && a.d_x == b.d_x && a.d_topk_weights == b.d_topk_weights &&
         a.d_w1 == b.d_w1 && a.d_w2 == b.d_w2;
}

TEST(Job, HasTheBitsOfOneRank) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const char* routing : {"zipf:1.2", "one-hot", "W4"}) {
      const Case data = random_case({.tokens = 50, .hidden = 24, .ffn = 72, .experts = 10}, dtype,
                                    routing, 4, 0.1);
      const CaseResult expected = run_case_sequential(data, true);
      for (const int num_ranks : {1, 2, 4}) {
        for (std::uint64_t i = 0; i < 3; ++i) {
          const Schedule schedule = sample_schedule(7, i);
          const Ends ends = run_job(unique_name(), num_ranks, [&](const Job& job) {
            const CaseResult result = run_case(data, job_options(job, schedule));
            if (job.rank == 0 ? !equal(result, expected) : !result.out.empty()) {
              throw Error(ErrorCode::world, "other bits");
            }
          });
          EXPECT_EQ(ends, Ends(static_cast<std::size_t>(num_ranks), "ok")) << to_string(schedule);
        }
      }
    }
  }
}

TEST(Job, GroupsMadeOneAfterAnotherMayShareAName) {
  const Case data = random_case({}, DType::f32);
  const Ends ends = run_job(unique_name(), 3, [&](const Job& job) {
    for (int i = 0; i < 20; ++i) static_cast<void>(run_case(data, job_options(job)));
  });
  EXPECT_EQ(ends, Ends(3, "ok"));
}

TEST(Job, TwoJobsAtOnceDoNotMeet) {
  const Case data = random_case({}, DType::f32);
  const CaseResult expected = run_case_sequential(data, true);
  const std::string even = unique_name(), odd = unique_name();
  const Ends ends = run_job("all", 6, [&](const Job& job) {
    const Job part{job.rank % 2 == 0 ? even : odd, job.rank / 2, 3};
    const CaseResult result = run_case(data, job_options(part));
    if (part.rank == 0 && !equal(result, expected)) throw Error(ErrorCode::world, "other bits");
  });
  EXPECT_EQ(ends, Ends(6, "ok"));
}

// The bound of waits is an hour: only the notice of the death can end the others.
TEST(Job, AKilledRankIsNamedByAllAndNothingIsLeft) {
  const Case data = random_case({.tokens = 64, .hidden = 16, .ffn = 64}, DType::f32);
  std::set<std::filesystem::path> before, after;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) before.insert(entry);
  Rng rng(17);
  int killed = 0;
  for (int round = 0; round < 50; ++round) {
    const int victim = static_cast<int>(rng.below(4));
    const auto fatal = static_cast<int>(rng.below(12));
    const Schedule schedule = sample_schedule(5, rng.below(1000));
    const Ends ends = run_job(unique_name(), 4, [&](const Job& job) {
      RunOptions options = job_options(job, schedule);
      options.wait_bound = std::chrono::hours(1);
      std::atomic<int> tasks{0};
      options.before_task = [&](const TaskInfo& task) {
        if (task.rank == victim && tasks.fetch_add(1) == fatal) ::kill(::getpid(), SIGKILL);
      };
      static_cast<void>(run_case(data, options));
    });
    const auto place = static_cast<std::size_t>(victim);
    if (ends[place] == "ok") continue;  // it had fewer tasks than that
    ++killed;
    EXPECT_EQ(ends[place], "killed");
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      // Who had all it needed may be done.
      if (rank == place || (rank != 0 && ends[rank] == "ok")) continue;
      EXPECT_EQ(ends[rank].rfind("world ", 0), 0U) << ends[rank];
      EXPECT_NE(ends[rank].find(fmt::format("rank {} (process", victim)), std::string::npos)
          << "rank " << rank << ": " << ends[rank];
    }
  }
  EXPECT_GT(killed, 25);
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) after.insert(entry);
  EXPECT_EQ(after, before);
}

TEST(Job, RanksThatDisagreeAreToldBothSides) {
  const Case data = random_case({}, DType::f32);
  const Ends ends = run_job(unique_name(), 3, [&](const Job& job) {
    Schedule schedule;
    if (job.rank == 2) schedule.payload = Payload::choice;
    static_cast<void>(run_case(data, job_options(job, schedule)));
  });
  for (const std::string& end : ends) {
    EXPECT_EQ(end.rfind("invalid ", 0), 0U) << end;
    EXPECT_NE(end.find("rank 2 has"), std::string::npos) << end;
    EXPECT_NE(end.find("payload=choice"), std::string::npos) << end;
  }
}

TEST(Job, ARankThatDoesNotComeIsNamed) {
  const Case data = random_case({}, DType::f32);
  const auto body = [&](const Job& job) {
    RunOptions options = job_options(job);
    options.wait_bound = std::chrono::seconds(2);
    static_cast<void>(run_case(data, options));
  };
  for (const std::string& end : run_job(unique_name(), 4, {0, 1, 3}, body)) {
    EXPECT_EQ(end.rfind("world ", 0), 0U) << end;
    EXPECT_NE(end.find("rank 0 waited 2000 ms for the processes of rank 2"), std::string::npos)
        << end;
  }
  for (const std::string& end : run_job(unique_name(), 3, {1, 2}, body)) {
    EXPECT_NE(end.find("waited 2000 ms for the process of rank 0"), std::string::npos) << end;
  }
}

TEST(Job, ARankThatIsThereTwiceIsRefused) {
  const Case data = random_case({}, DType::f32);
  const Ends ends = run_job(unique_name(), 3, {0, 1, 1}, [&](const Job& job) {
    static_cast<void>(run_case(data, job_options(job)));
  });
  for (const std::string& end : ends) {
    EXPECT_NE(end.find("two processes of job"), std::string::npos) << end;
    EXPECT_NE(end.find("that they are rank 1"), std::string::npos) << end;
  }
}

// Rank 0 cannot have that much memory: the others hear why.
TEST(Job, MemoryThatIsNotThereIsToldToAll) {
  const Ends ends = run_job(unique_name(), 2, [](const Job& job) {
    cpu::GroupConfig config;
    config.shape = {.num_ranks = 2,
                    .num_experts = 4,
                    .topk = 2,
                    .hidden = 1 << 24,
                    .max_tokens = 1 << 20,
                    .element_bytes = 4};
    config.placement = make_contiguous_placement(4, 2);
    config.job = job;
    cpu::Group group(std::move(config));
  });
  for (const std::string& end : ends) {
    EXPECT_EQ(end.rfind("world ", 0), 0U) << end;
    EXPECT_NE(end.find("symmetric heap needs"), std::string::npos) << end;
  }
}

cpu::GroupConfig small_config(const Job& job) {
  cpu::GroupConfig config;
  config.shape = {.num_ranks = job.num_ranks,
                  .num_experts = 4,
                  .topk = 2,
                  .hidden = 8,
                  .max_tokens = 8,
                  .element_bytes = 4};
  config.placement = make_contiguous_placement(4, job.num_ranks);
  config.job = job;
  config.common_bytes = 64;
  return config;
}

TEST(Job, LeavingIsNoLoss) {
  const Ends ends = run_job(unique_name(), 3, [](const Job& job) {
    cpu::Group group(small_config(job));
    auto* left = reinterpret_cast<std::uint64_t*>(group.common());
    if (job.rank == 0) {
      // Until the others' processes are gone; then a loss would have been noticed.
      wait_at_least(group.state(), left, 2, {.rank = 0, .stage = "test"});
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (const auto failure = failure_of(group.state())) throw Error(ErrorCode::world, *failure);
    } else {
      std::atomic_ref<std::uint64_t>(*left).fetch_add(1);
    }
  });
  EXPECT_EQ(ends, Ends(3, "ok"));
}

TEST(Job, ALayerOfAnotherProcessIsRefused) {
  const Ends ends = run_job(unique_name(), 2, [](const Job& job) {
    cpu::Group group(small_config(job));
    if (job.rank == 1) static_cast<void>(group.epochs(0));
  });
  EXPECT_EQ(ends[1], "invalid rank is 0; this process is rank 1 of its job");
}

class JobEnvironment : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }
  static void clear() {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
          "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE",
          "MPI_LOCALNRANKS", "PMIX_NAMESPACE", "UNIEP_JOB"}) {
      ::unsetenv(name);
    }
  }
  static void set(const char* name, const char* value) { ::setenv(name, value, 1); }
  static std::string error() {
    try {
      static_cast<void>(job_from_environment());
      return "none";
    } catch (const Error& e) {
      return e.what();
    }
  }
};

TEST_F(JobEnvironment, WithoutALauncherIsNone) { EXPECT_FALSE(job_from_environment()); }

TEST_F(JobEnvironment, OfTorchrun) {
  set("RANK", "2");
  set("WORLD_SIZE", "4");
  set("LOCAL_WORLD_SIZE", "4");
  set("MASTER_ADDR", "localhost");
  set("MASTER_PORT", "29500");
  const auto job = job_from_environment();
  ASSERT_TRUE(job);
  EXPECT_EQ(job->rank, 2);
  EXPECT_EQ(job->num_ranks, 4);
  set("MASTER_PORT", "29501");
  EXPECT_NE(job_from_environment()->name, job->name);
  set("UNIEP_JOB", "mine");
  EXPECT_EQ(job_from_environment()->name, "mine");
}

TEST_F(JobEnvironment, OfMpi) {
  set("OMPI_COMM_WORLD_RANK", "1");
  set("OMPI_COMM_WORLD_SIZE", "2");
  EXPECT_EQ(job_from_environment()->rank, 1);
  clear();
  set("PMI_RANK", "0");
  set("PMI_SIZE", "8");
  EXPECT_EQ(job_from_environment()->num_ranks, 8);
}

TEST_F(JobEnvironment, WhatIsNoRankIsRefused) {
  set("RANK", "4");
  set("WORLD_SIZE", "4");
  set("MASTER_PORT", "1");
  EXPECT_EQ(error(), "the environment has RANK=4; it must be a whole number from 0 to 3");
  set("RANK", "1x");
  EXPECT_NE(error().find("RANK=1x"), std::string::npos);
  set("RANK", "1");
  set("LOCAL_WORLD_SIZE", "2");
  EXPECT_NE(error().find("2 of 4 ranks are on this machine"), std::string::npos);
  ::unsetenv("LOCAL_WORLD_SIZE");
  ::unsetenv("MASTER_PORT");
  EXPECT_NE(error().find("MASTER_PORT"), std::string::npos);
}

}  // namespace
}  // namespace uniep::test
