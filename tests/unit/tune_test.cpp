// SPDX-License-Identifier: Apache-2.0
// The tuner: what it chooses is legal and never worse than the default; its file survives whatever
// is in it, and processes that store at once.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/rng.hpp"
#include "schedule/space.hpp"
#include "simulate/cpu_score.hpp"
#include "tune/state_file.hpp"
#include "tune/tuner.hpp"

namespace uniep::tune {
namespace {

Candidate candidate(const std::string& schedule, double us, const std::string& family = "a") {
  Candidate c;
  c.schedule = schedule;
  c.family = family;
  c.predicted.tensor = us;
  return c;
}

TEST(Tuner, WithoutAMeasureTheBestPredictionIsTaken) {
  const auto fallback = candidate("d", 10);
  const Tuned tuned =
      choose({candidate("x", 9), candidate("y", 7), candidate("z", 8, "b")}, fallback, {}, {});
  EXPECT_EQ(tuned.choice.schedule, "y");
  ASSERT_TRUE(tuned.runner_up.has_value());
  EXPECT_EQ(tuned.runner_up->schedule, "z");
  EXPECT_EQ(tuned.num_scored, 3);
  EXPECT_EQ(choose({candidate("x", 11)}, fallback, {}, {}).choice.schedule, "d");
}

TEST(Tuner, TheMeasurementDecidesAndTheDefaultIsKeptForLessThanItsGain) {
  const auto fallback = candidate("d", 10);
  const std::vector<Candidate> scored{candidate("x", 5), candidate("y", 6, "b"),
                                      candidate("z", 5.5), candidate("w", 9)};
  std::vector<std::string> asked;
  const auto measure = [&](double x, double y) {
    return [&asked, x, y](const std::string& s) -> std::optional<double> {
      asked.push_back(s);
      if (s == "d") return 100;
      return s == "x" ? x : y;
    };
  };
  Tuned tuned = choose(scored, fallback, measure(120, 80), {.candidates = 2, .repeats = 3});
  EXPECT_EQ(tuned.choice.schedule, "y");
  EXPECT_EQ(tuned.runner_up->schedule, "d");
  EXPECT_EQ(tuned.measured.size(), 3U);  // the best of each family, and the default
  EXPECT_EQ(asked.size(), 4U * 3U);      // a round to warm up
  EXPECT_DOUBLE_EQ(tuned.choice.measured_us, 80);
  tuned = choose(scored, fallback, measure(99.5, 120), {.candidates = 2});
  EXPECT_EQ(tuned.choice.schedule, "d") << "half a percent is no gain";
  EXPECT_EQ(tuned.runner_up->schedule, "x");
}

TEST(Tuner, WhatCannotRunIsPassedOver) {
  const auto fallback = candidate("d", 10);
  const std::vector<Candidate> scored{candidate("x", 5), candidate("y", 6, "b")};
  int asked = 0;
  const Tuned tuned = choose(scored, fallback,
                             [&asked](const std::string& s) -> std::optional<double> {
                               if (s == "x") {
                                 ++asked;
                                 return std::nullopt;
                               }
                               return s == "y" ? 50 : 100;
                             },
                             {});
  EXPECT_EQ(tuned.choice.schedule, "y");
  EXPECT_EQ(asked, 1);
  const Tuned none =
      choose(scored, fallback, [](const std::string&) { return std::optional<double>(); }, {});
  EXPECT_EQ(none.choice.schedule, "d");
  EXPECT_TRUE(none.measured.empty());
}

// Whatever a machine measures, and whatever the shape, what is chosen can run.
TEST(Tuner, TheChoiceIsLegalForRandomShapes) {
  Rng rng(5);
  const auto draw = [&rng](std::uint64_t low, std::uint64_t high) {
    return static_cast<std::int64_t>(low + rng.below(high - low + 1));
  };
  const auto hardware = simulate::load_hardware(UNIEP_SOURCE_DIR "/hw/h200.json");
  for (int i = 0; i < 12; ++i) {
    LayerSizes sizes;
    sizes.tokens = draw(0, 4000);
    sizes.hidden = 8 * draw(1, 600);
    sizes.ffn = 8 * draw(1, 600);
    sizes.experts = draw(1, 200);
    sizes.topk = static_cast<int>(draw(1, 10));
    sizes.ranks = static_cast<int>(draw(1, 16));
    const Measure measure = [&rng](const std::string&) -> std::optional<double> {
      if (rng.below(8) == 0) return std::nullopt;
      return 1 + rng.uniform01();
    };
    const int per_gpu = sizes.ranks <= 8 && rng.below(2) == 0 ? sizes.ranks : 1;
    const simulate::Scorer scorer(
        hardware,
        simulate::uniform_load(sizes, {.ranks = sizes.ranks, .ranks_per_gpu = per_gpu}, 1.2));
    std::vector<Candidate> scored;
    for (const CudaSchedule& s : legal_cuda_schedules(sizes, scorer.limits(), {})) {
      scored.push_back({to_string(s), to_string(s).substr(0, 60), scorer.layer(s), 0});
    }
    ASSERT_FALSE(scored.empty());
    const CudaSchedule fallback;
    ASSERT_EQ(why_illegal(fallback, sizes, scorer.limits()), std::nullopt);
    const Candidate plain{to_string(fallback), "", scorer.layer(fallback), 0};
    for (const bool measured : {false, true}) {
      const Tuned tuned = choose(scored, plain, measured ? measure : Measure(), {.repeats = 2});
      EXPECT_EQ(why_illegal(parse_cuda_schedule(tuned.choice.schedule), sizes, scorer.limits()),
                std::nullopt)
          << tuned.choice.schedule;
    }
    std::vector<std::int64_t> rows(static_cast<std::size_t>(sizes.experts));
    for (auto& r : rows) r = draw(0, 300);
    const simulate::CpuScorer cpu({.cores = 4, .flops_rate = 5e4, .copy_rate = 5e3, .task_us = 2},
                                  sizes, rows, true);
    Schedule base;
    base.workers = static_cast<std::int32_t>(draw(1, 4));
    scored.clear();
    for (const Schedule& s : legal_schedules(sizes, base)) {
      const simulate::Parts p = cpu.layer(s);
      for (const auto& [name, part] : simulate::kParts) ASSERT_TRUE(p.*part >= 0) << name;
      scored.push_back({to_string(s), to_string(s).substr(0, 40), p, 0});
    }
    const Tuned tuned = choose(scored, {to_string(base), "", cpu.layer(base), 0}, measure, {});
    EXPECT_EQ(why_illegal(parse_schedule(tuned.choice.schedule), sizes), std::nullopt);
  }
}

TEST(Tuner, CpuPredictionsKnowWhatCosts) {
  LayerSizes sizes{.tokens = 256,
                   .hidden = 512,
                   .ffn = 384,
                   .experts = 16,
                   .topk = 4,
                   .ranks = 2,
                   .dtype = DType::f32};
  const std::vector<std::int64_t> rows(16, 128);
  const simulate::CpuMachine machine{.cores = 8, .flops_rate = 5e4, .copy_rate = 5e3, .task_us = 2};
  const simulate::CpuScorer scorer(machine, sizes, rows, true);
  const auto time = [&](const char* text) { return scorer.layer(parse_schedule(text)).total(); };
  EXPECT_LT(time("tile_m=64"), time("tile_m=8"));   // packing and tasks
  EXPECT_LT(time("workers=2"), time("workers=1"));  // cores are there
  EXPECT_LT(time("payload=rank"), time("payload=choice"));
  EXPECT_LT(time("chunk=16"), time("chunk=1"));
  EXPECT_LT(time("workers=2,fusion=fused"), time("workers=2,fusion=split"));
  std::vector<std::int64_t> skewed(16, 0);
  skewed[0] = 2048;
  EXPECT_GT(simulate::CpuScorer(machine, sizes, skewed, true).layer({}).total(), time(""));
}

class StateFileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("uniep_tune_" + std::to_string(::getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(folder_);
    path_ = (folder_ / "deep" / "tuned.json").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  StateFile file() {
    return {path_, kCacheKind, kCacheVersion,
            [this](const std::string& text) { warnings_.push_back(text); }};
  }
  void write(const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    std::ofstream(path_) << text;
  }

  static Key key(int ranks) {
    return {.backend = "cpu",
            .device = "d",
            .driver = "1",
            .shape = "s",
            .skew = "even",
            .code = "c",
            .ranks = ranks,
            .tokens = 100};
  }
  static bool any(const std::string&) { return true; }

  std::filesystem::path folder_;
  std::string path_;
  std::vector<std::string> warnings_;
};

TEST_F(StateFileTest, AChoiceIsFoundForItsKeyAlone) {
  StateFile f = file();
  EXPECT_FALSE(find_choice(f, key(2), any).has_value());
  ASSERT_TRUE(store_choice(f, key(2), {"fusion=split", 3, 4, 5}));
  const auto found = find_choice(f, key(2), any);
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->schedule, "fusion=split");
  EXPECT_DOUBLE_EQ(found->default_us, 5);
  EXPECT_FALSE(find_choice(f, key(3), any).has_value());
  Key other = key(2);
  other.tokens = 128;  // of the same bucket as 100
  EXPECT_TRUE(find_choice(f, other, any).has_value());
  other.tokens = 129;
  EXPECT_FALSE(find_choice(f, other, any).has_value());
  for (std::string Key::*part :
       {&Key::backend, &Key::device, &Key::driver, &Key::shape, &Key::skew, &Key::code}) {
    Key changed = key(2);
    changed.*part += "x";
    EXPECT_FALSE(find_choice(f, changed, any).has_value());
  }
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(StateFileTest, WhatIsNoneOfOursIsIgnoredWithOneWarningAndRewritten) {
  for (const char* text :
       {"", "{", "[1]", "null", "{\"other\": 1}", "{\"uniep_tuned\": 0, \"entries\": {}}",
        "{\"uniep_tuned\": 2, \"entries\": {}}", "{\"uniep_tuned\": 1}",
        "{\"uniep_tuned\": 1, \"entries\": 3}", "\x01\x02\xff\xfe"}) {
    write(text);
    warnings_.clear();
    StateFile f = file();
    EXPECT_FALSE(find_choice(f, key(1), any).has_value()) << text;
    EXPECT_FALSE(find_choice(f, key(1), any).has_value());
    ASSERT_TRUE(store_choice(f, key(1), {"a", 1, 1, 1})) << text;
    ASSERT_EQ(warnings_.size(), 1U) << text;
    EXPECT_NE(warnings_[0].find(path_), std::string::npos);
    EXPECT_NE(warnings_[0].find("rewritten"), std::string::npos);
    StateFile again = file();
    EXPECT_TRUE(find_choice(again, key(1), any).has_value()) << text;
    EXPECT_EQ(warnings_.size(), 1U);
  }
}

TEST_F(StateFileTest, AnEntryThatCannotRunOrIsNoChoiceIsIgnored) {
  StateFile f = file();
  ASSERT_TRUE(store_choice(f, key(1), {"blocks=99", 1, 1, 1}));
  const auto legal = [](const std::string& s) { return s != "blocks=99"; };
  EXPECT_FALSE(find_choice(f, key(1), legal).has_value());
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("blocks=99"), std::string::npos);
  StateFile g = file();
  ASSERT_TRUE(g.update([](nlohmann::json& entries) { entries[key(1).text()] = 7; }));
  EXPECT_FALSE(find_choice(g, key(1), any).has_value());
  EXPECT_EQ(warnings_.size(), 2U);
}

TEST_F(StateFileTest, ProcessesThatStoreAtOnceLoseNothing) {
  constexpr int kProcesses = 4, kEach = 25;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = ::fork();
    if (child == 0) {
      StateFile f = file();
      bool ok = true;
      for (int i = 0; i < kEach; ++i) {
        ok = store_choice(f, key(1 + p * kEach + i), {"a", 1, 1, 1}) && ok;
        // Whoever reads meanwhile sees a whole file.
        ok = find_choice(f, key(1 + p * kEach + i), any).has_value() && ok;
      }
      ::_exit(ok && warnings_.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  StateFile f = file();
  EXPECT_EQ(f.read().size(), static_cast<std::size_t>(kProcesses * kEach));
}

TEST_F(StateFileTest, AHeldLockAndAFolderThatCannotBeWrittenEndInAWarning) {
  StateFile f = file();
  ASSERT_TRUE(store_choice(f, key(1), {"a", 1, 1, 1}));
  const int fd = ::open((path_ + ".lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::flock(fd, LOCK_EX), 0);
  EXPECT_FALSE(store_choice(f, key(2), {"a", 1, 1, 1}));
  ::close(fd);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("locked"), std::string::npos);
  StateFile g("/proc/nowhere/tuned.json", kCacheKind, kCacheVersion,
              [this](const std::string& text) { warnings_.push_back(text); });
  EXPECT_FALSE(store_choice(g, key(2), {"a", 1, 1, 1}));
  EXPECT_EQ(warnings_.size(), 2U);
}

}  // namespace
}  // namespace uniep::tune
