// SPDX-License-Identifier: Apache-2.0
// Timing of candidates side by side: one round runs each candidate once, so that a machine that
// slows down slows all of them, and only their ratios are meant to be compared.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/rng.hpp"

namespace uniep::bench {

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> ms;  // ascending once interleave has returned
};

inline double elapsed_ms(const std::function<void()>& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// One untimed round, then `repeats` rounds; every second round runs in the opposite order.
inline void interleave(std::vector<Candidate>& candidates, int repeats) {
  for (Candidate& c : candidates) c.run();
  for (int i = 0; i < repeats; ++i) {
    for (Candidate& c : candidates) c.ms.push_back(elapsed_ms(c.run));
    std::reverse(candidates.begin(), candidates.end());
  }
  if (repeats % 2 != 0) std::reverse(candidates.begin(), candidates.end());
  for (Candidate& c : candidates) std::sort(c.ms.begin(), c.ms.end());
}

inline double median(const Candidate& c) { return c.ms[c.ms.size() / 2]; }

inline void print_header() {
  fmt::print("{:<28} {:>10} {:>10} {:>10}\n", "", "median ms", "min", "max");
}

inline void print_row(const Candidate& c) {
  fmt::print("{:<28} {:>10.3f} {:>10.3f} {:>10.3f}\n", c.name, median(c), c.ms.front(),
             c.ms.back());
}

// Values like those of activations; timing on zeros would flatter caches and compression alike.
inline std::vector<float> random_floats(std::size_t count, std::uint64_t stream) {
  Rng rng(1, stream);
  std::vector<float> values(count);
  for (float& value : values) value = rng.normal();
  return values;
}

// The value behind `flag`, a whole number of at least 1, or `fallback`; exits with 2 otherwise.
inline std::int64_t flag_value(int argc, char** argv, std::string_view flag,
                               std::int64_t fallback) {
  for (int i = 1; i < argc; ++i) {
    if (flag != argv[i]) continue;
    std::int64_t value = 0;
    const char* text = i + 1 < argc ? argv[i + 1] : "";
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
    if (error == std::errc{} && *end == '\0' && value >= 1) return value;
    fmt::print(stderr, "{} is '{}'; it must be a whole number of at least 1\n", flag, text);
    std::exit(2);
  }
  return fallback;
}

}  // namespace uniep::bench
