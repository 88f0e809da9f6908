// SPDX-License-Identifier: Apache-2.0
// Training over ranks: losses and every weight are the same bits for any number of ranks and any
// schedule, through a stop and a resume too, and a failing rank ends the run on all.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "base/error.hpp"
#include "train/checkpoint.hpp"
#include "train/trainer.hpp"

namespace uniep::train {
namespace {

// Uneven on purpose: 5 experts and 6 sequences divide by none of 4 and 7 ranks, and 7 ranks are
// more than either.
Config small_config() {
  Config config;
  config.hidden = 16;
  config.ffn = 24;
  config.experts = 5;
  config.topk = 2;
  config.context = 4;
  config.sequence = 8;
  config.batch = 6;
  return config;
}

Text sample_text(const Config& config) {
  std::vector<std::uint8_t> bytes;
  for (int i = 0; i < 400; ++i) {
    for (const char c : std::string(i % 3 == 0 ? "the same " : "bits, ")) {
      bytes.push_back(static_cast<std::uint8_t>(c));
    }
  }
  return make_text(std::move(bytes), config, "text");
}

struct Training {
  ModelState state;
  Evaluation held_out;
  std::vector<StepResult> steps;
};

Training run(ModelState state, const Text& text, int num_ranks, const std::string& schedule,
             std::int64_t steps) {
  Training result{std::move(state), {}, {}};
  TrainOptions options;
  options.num_ranks = num_ranks;
  options.schedule = parse_schedule(schedule);
  options.steps = steps;
  options.after_step = [&](const ModelState& now, const StepResult& step) {
    EXPECT_EQ(now.step, step.step);
    result.steps.push_back(step);
  };
  result.held_out = train(result.state, text, options);
  return result;
}

bool equal(const Trained& a, const Trained& b) {
  return a.value == b.value && a.m == b.m && a.v == b.v;
}

void expect_same(const Training& a, const Training& b) {
  EXPECT_EQ(a.state.step, b.state.step);
  EXPECT_EQ(a.state.loss_hash, b.state.loss_hash);
  EXPECT_TRUE(equal(a.state.dense, b.state.dense));
  for (std::size_t layer = 0; layer < a.state.w1.size(); ++layer) {
    EXPECT_TRUE(equal(a.state.w1[layer], b.state.w1[layer]));
    EXPECT_TRUE(equal(a.state.w2[layer], b.state.w2[layer]));
  }
  EXPECT_EQ(a.held_out.loss, b.held_out.loss);
  EXPECT_EQ(a.held_out.loss_without_experts, b.held_out.loss_without_experts);
  EXPECT_EQ(a.held_out.load, b.held_out.load);
}

constexpr const char* kSplit = "fusion=split,payload=choice,direction=pull,workers=2,tile_m=8";
constexpr const char* kRoles = "workers=3,comm_workers=1,chunk=3,expert_order=rotated,wgrad=after";

TEST(Train, RanksAndSchedulesGiveTheSameBits) {
  const Config config = small_config();
  const Text text = sample_text(config);
  const Training one = run(make_model_state(config), text, 1, "", 4);
  ASSERT_EQ(one.steps.size(), 4U);
  for (const int ranks : {1, 2, 3, 4, 7}) {
    for (const char* schedule : {"", kSplit, kRoles}) {
      SCOPED_TRACE(fmt::format("{} ranks, {}", ranks, schedule));
      expect_same(run(make_model_state(config), text, ranks, schedule, 4), one);
    }
  }
  Config other = config;
  other.seed = 2;
  EXPECT_NE(run(make_model_state(other), text, 1, "", 4).state.loss_hash, one.state.loss_hash);
}

TEST(Train, ResumingOnOtherRanksGivesTheSameBits) {
  const Config config = small_config();
  const Text text = sample_text(config);
  const Training whole = run(make_model_state(config), text, 2, "", 5);
  std::string folder = (std::filesystem::temp_directory_path() / "uniep-train-XXXXXX").string();
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/a.safetensors";
  save_checkpoint(path, run(make_model_state(config), text, 3, kSplit, 2).state, text);
  std::uint64_t hash = 0;
  const Training rest = run(load_checkpoint(path, hash), text, 4, kRoles, 5);
  std::filesystem::remove_all(folder);
  EXPECT_EQ(hash, text.hash);
  ASSERT_EQ(rest.steps.size(), 3U);
  EXPECT_EQ(rest.steps[0].step, 3);
  EXPECT_EQ(rest.steps[2].loss, whole.steps[4].loss);
  expect_same(rest, whole);
}

TEST(Train, LearnsTheText) {
  const Config config = small_config();
  const Text text = sample_text(config);
  const Training learned = run(make_model_state(config), text, 2, "", 60);
  EXPECT_NEAR(learned.steps[0].loss, std::log(256.0), 0.2);
  const double order1 = order1_entropy(text.held_out()) * std::log(2.0);
  EXPECT_LT(learned.held_out.loss, order1);
  EXPECT_LT(learned.held_out.loss, learned.held_out.loss_without_experts);
  // Exact: every held-out byte has topk choices in each layer.
  for (std::size_t layer = 0; layer < 2; ++layer) {
    std::int64_t choices = 0;
    for (std::size_t e = 0; e < 5; ++e) choices += learned.held_out.load[layer * 5 + e];
    EXPECT_EQ(choices, static_cast<std::int64_t>(text.held_out().size()) * config.topk);
  }
  for (const StepResult& step : learned.steps) {
    EXPECT_LE(step.balance, static_cast<double>(config.experts));
    EXPECT_GT(step.balance, 0.5);
  }
}

TEST(Train, AFailingRankEndsTheRunOnAll) {
  const Config config = small_config();
  const Text text = sample_text(config);
  for (const int failing : {0, 2}) {
    ModelState state = make_model_state(config);
    TrainOptions options;
    options.num_ranks = 3;
    options.wait_bound = std::chrono::hours(1);  // nobody may need it
    options.steps = 5;
    options.before_step = [failing](int rank, std::int64_t step) {
      if (rank == failing && step == 2) throw_world("rank {} is out", rank);
    };
    try {
      train(state, text, options);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::world);
      EXPECT_EQ(error.what(), fmt::format("rank {} is out", failing));
    }
    EXPECT_EQ(state.step, 1);
  }
}

TEST(Train, AnErrorOfTheCallerEndsTheRun) {
  const Config config = small_config();
  const Text text = sample_text(config);
  ModelState state = make_model_state(config);
  TrainOptions options;
  options.num_ranks = 2;
  options.steps = 5;
  options.wait_bound = std::chrono::hours(1);
  options.after_step = [](const ModelState&, const StepResult&) {
    throw_world("the disk is full");
  };
  EXPECT_THROW(train(state, text, options), Error);
  options.after_step = nullptr;
  for (float& value : state.dense.value) value = std::numeric_limits<float>::quiet_NaN();
  try {
    train(state, text, options);
    ADD_FAILURE() << "trained on NaN";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("the loss of step 2 is nan"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace uniep::train
