// SPDX-License-Identifier: Apache-2.0
// Reading "key=value,…" into a schedule, for the schedules of every backend. Errors of all
// functions: invalid_argument, naming the key, what was given and what would be valid.
#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "base/error.hpp"

namespace uniep {

// Calls `apply(key, value)` for each item of `text`, in order. Refused: an item without '=', a key
// given twice, a comma without an item behind it.
void for_each_item(std::string_view text,
                   const std::function<void(std::string_view, std::string_view)>& apply);

// Names in the order of the enumerators: value i of an enum prints as names[i].
template <typename Enum>
std::string_view name_of(Enum value, std::span<const std::string_view> names) {
  return names[static_cast<std::size_t>(value)];
}

template <typename Enum>
void parse_enum(std::string_view key, std::string_view text,
                std::span<const std::string_view> names, Enum& value) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == text) {
      value = static_cast<Enum>(i);
      return;
    }
  }
  throw_invalid("schedule {} is '{}'; it can be {} or {}", key, text, names[0], names[1]);
}

void parse_int(std::string_view key, std::string_view text, std::int32_t& value);

void check_range(std::string_view key, std::int32_t value, std::int32_t low, std::int32_t high,
                 std::int32_t step);

// Draws for sampling a schedule space, a function of (seed, index).
class ScheduleDraws {
 public:
  ScheduleDraws(std::uint64_t seed, std::uint64_t index);
  // 0 to n - 1.
  std::uint64_t operator()(std::uint64_t n);

 private:
  std::uint64_t state_;
};

}  // namespace uniep
