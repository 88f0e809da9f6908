// SPDX-License-Identifier: Apache-2.0
// Choosing a schedule: all legal points are scored, the best few are measured beside the default,
// and the quickest of those is kept. How to measure is the caller's: this neither knows a backend
// nor runs one. A choice is of points that were legal, so it is; the default is never left for
// less than it gains.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "simulate/score.hpp"
#include "tune/state_file.hpp"

namespace uniep::tune {

struct Candidate {
  std::string schedule;  // as to_string has it
  std::string family;    // of those alike, only a few are measured
  simulate::Parts predicted;
  double measured_us = 0;  // median; 0: not measured
};

// Microseconds of one run; nothing where the schedule cannot run after all.
using Measure = std::function<std::optional<double>(const std::string& schedule)>;

struct TuneOptions {
  int candidates = 6;  // measured besides the default
  int repeats = 5;
  double seconds = 30;       // after which no further round is begun
  double least_gain = 0.01;  // share of the default's time that a choice must save
};

struct Tuned {
  Candidate choice, fallback;
  std::optional<Candidate> runner_up;
  std::vector<Candidate> measured;  // the default first; empty without a measure
  std::int64_t num_scored = 0;
  int rounds = 0;
};

// `scored` must hold a point. Without a `measure` the best prediction is taken. Errors: what
// `measure` throws.
[[nodiscard]] Tuned choose(const std::vector<Candidate>& scored, const Candidate& fallback,
                           const Measure& measure, const TuneOptions& options);

// What a choice was made for.
struct Key {
  std::string backend, device, driver, shape, skew, code;
  int ranks = 1;
  std::int64_t tokens = 0;  // of a rank

  // Tokens count by the power of two that holds them.
  [[nodiscard]] std::string text() const;
};
[[nodiscard]] std::int64_t token_bucket(std::int64_t tokens);

struct Stored {
  std::string schedule;
  double predicted_us = 0, measured_us = 0, default_us = 0;
};

inline constexpr int kCacheVersion = 1;
inline constexpr const char* kCacheKind = "uniep_tuned";

// `is_legal` judges a stored schedule again, since anybody may have written the file; one that is
// not is ignored, with the file's warning.
[[nodiscard]] std::optional<Stored> find_choice(
    StateFile& file, const Key& key, const std::function<bool(const std::string&)>& is_legal);
bool store_choice(StateFile& file, const Key& key, const Stored& stored);

}  // namespace uniep::tune
