// SPDX-License-Identifier: Apache-2.0
// Trains over ranks that are threads: sequences are split over them (data parallel), experts too
// (expert parallel, through uniep::Layer). Losses and weights are the same bits for every number of
// ranks and every schedule.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "train/model_state.hpp"
#include "train/text.hpp"
#include "uniep/schedule.hpp"

namespace uniep::train {

struct StepResult {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // mean of -ln p over the batch's bytes
  double balance = 0;     // load-balancing loss, mean over the layers: 1 where even, at most E
};

struct TrainOptions {
  int num_ranks = 1;
  Schedule schedule;
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  std::int64_t steps = 0;  // trains until the state has done as many
  // Called once, when sizes, schedule and memory have been found good and before any step.
  std::function<void()> on_start;
  // Called by one rank after each step, while the others leave the state alone.
  std::function<void(const ModelState&, const StepResult&)> after_step;
  // Called by each rank before a step (the number of the step to come); for tests: it may throw.
  std::function<void(int rank, std::int64_t step)> before_step;
};

struct Evaluation {
  double loss = 0;                  // mean of -ln p over the held-out bytes
  double loss_without_experts = 0;  // the same with the output of all MoE layers zero
  std::vector<std::int64_t> load;   // [layers, E] choices of each expert over the held-out bytes
};

// Errors: invalid_argument for sizes or a schedule that cannot run and for a loss that is no number
// any more; world for missing memory, a lost rank or an expired wait. After an error the state is
// half a step on: go back to a checkpoint.
Evaluation train(ModelState& state, const Text& text, const TrainOptions& options);

}  // namespace uniep::train
