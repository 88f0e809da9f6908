// SPDX-License-Identifier: Apache-2.0
#include "tune/tuner.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.hpp"

namespace uniep::tune {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The best of each family, then the second best of each, and so on.
std::vector<Candidate> pick(const std::vector<Candidate>& scored, int count) {
  std::vector<std::size_t> order(scored.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return scored[a].predicted.total() < scored[b].predicted.total();
  });
  std::map<std::string, int> place;
  std::vector<std::pair<int, std::size_t>> ranked;
  for (const std::size_t i : order) ranked.emplace_back(place[scored[i].family]++, i);
  std::stable_sort(ranked.begin(), ranked.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Candidate> picked;
  for (const auto& [rank, i] : ranked) {
    if (static_cast<int>(picked.size()) == count) break;
    picked.push_back(scored[i]);
  }
  return picked;
}

}  // namespace

Tuned choose(const std::vector<Candidate>& scored, const Candidate& fallback,
             const Measure& measure, const TuneOptions& options) {
  UNIEP_ASSERT(!scored.empty());
  Tuned tuned;
  tuned.num_scored = static_cast<std::int64_t>(scored.size());
  tuned.fallback = fallback;
  const auto by_prediction = [](const Candidate& a, const Candidate& b) {
    return a.predicted.total() < b.predicted.total();
  };
  if (!measure) {
    tuned.choice = *std::min_element(scored.begin(), scored.end(), by_prediction);
    if (!by_prediction(tuned.choice, fallback)) tuned.choice = fallback;
    for (const Candidate& c : scored) {
      if (c.family == tuned.choice.family) continue;
      if (!tuned.runner_up || by_prediction(c, *tuned.runner_up)) tuned.runner_up = c;
    }
    return tuned;
  }
  std::vector<Candidate> all{fallback};
  for (const Candidate& c : pick(scored, options.candidates)) {
    if (c.schedule != fallback.schedule) all.push_back(c);
  }
  std::vector<std::vector<double>> times(all.size());
  std::vector<bool> runs(all.size(), true);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // Interleaved, so that a machine that slows down slows all of them; the first round warms up.
  for (int round = 0; round <= options.repeats; ++round) {
    if (round > 1 && seconds() > options.seconds) break;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!runs[i]) continue;
      const std::optional<double> us = measure(all[i].schedule);
      runs[i] = us.has_value() && std::isfinite(*us) && *us > 0;
      if (runs[i] && round > 0) times[i].push_back(*us);
    }
    tuned.rounds = round;
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!runs[i] || times[i].empty()) continue;
    all[i].measured_us = median(times[i]);
    tuned.measured.push_back(all[i]);
  }
  if (runs[0] && !times[0].empty()) tuned.fallback = all[0];
  tuned.choice = tuned.fallback;
  std::vector<Candidate> order = tuned.measured;
  std::stable_sort(order.begin(), order.end(), [](const Candidate& a, const Candidate& b) {
    return a.measured_us < b.measured_us;
  });
  const double most = tuned.fallback.measured_us > 0
                          ? tuned.fallback.measured_us * (1 - options.least_gain)
                          : std::numeric_limits<double>::max();
  if (!order.empty() && order.front().measured_us < most) tuned.choice = order.front();
  for (const Candidate& c : order) {
    if (c.schedule == tuned.choice.schedule) continue;
    tuned.runner_up = c;
    break;
  }
  return tuned;
}

std::int64_t token_bucket(std::int64_t tokens) {
  std::int64_t bucket = 1;
  while (bucket < tokens) bucket *= 2;
  return bucket;
}

std::string Key::text() const {
  return fmt::format(
      "backend={}; device={}; driver={}; shape={}; ranks={}; tokens<={}; skew={}; code={}", backend,
      device, driver, shape, ranks, token_bucket(tokens), skew, code);
}

std::optional<Stored> find_choice(StateFile& file, const Key& key,
                                  const std::function<bool(const std::string&)>& is_legal) {
  const nlohmann::json entries = file.read();
  const auto found = entries.find(key.text());
  if (found == entries.end()) return std::nullopt;
  const nlohmann::json& entry = *found;
  const auto is_number = [&entry](const char* name) {
    return entry.contains(name) && entry[name].is_number();
  };
  if (!entry.is_object() || !entry.contains("schedule") || !entry["schedule"].is_string() ||
      !is_number("predicted_us") || !is_number("measured_us") || !is_number("default_us")) {
    file.warn("'" + file.path() + "' holds a choice without schedule or times; it is ignored");
    return std::nullopt;
  }
  Stored stored{.schedule = entry["schedule"],
                .predicted_us = entry["predicted_us"],
                .measured_us = entry["measured_us"],
                .default_us = entry["default_us"]};
  if (!is_legal(stored.schedule)) {
    file.warn("'" + file.path() + "' holds the schedule '" + stored.schedule +
              "', which cannot run here; it is ignored");
    return std::nullopt;
  }
  return stored;
}

bool store_choice(StateFile& file, const Key& key, const Stored& stored) {
  return file.update([&](nlohmann::json& entries) {
    entries[key.text()] = {{"schedule", stored.schedule},
                           {"predicted_us", stored.predicted_us},
                           {"measured_us", stored.measured_us},
                           {"default_us", stored.default_us}};
  });
}

}  // namespace uniep::tune
