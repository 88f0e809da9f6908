// SPDX-License-Identifier: Apache-2.0
#include "schedule/key_values.hpp"

#include <set>

namespace uniep {
namespace {

std::uint64_t mix(std::uint64_t x) {  // the finaliser of splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

void for_each_item(std::string_view text,
                   const std::function<void(std::string_view, std::string_view)>& apply) {
  std::set<std::string_view> seen;
  bool more = !text.empty();  // after a comma an item must follow, even at the end
  while (more) {
    const std::size_t comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    more = comma != std::string_view::npos;
    text = more ? text.substr(comma + 1) : std::string_view{};
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      throw_invalid("schedule item '{}' is not of the form key=value", item);
    }
    const std::string_view key = item.substr(0, equals);
    if (!seen.insert(key).second) throw_invalid("schedule key '{}' is given twice", key);
    apply(key, item.substr(equals + 1));
  }
}

void parse_int(std::string_view key, std::string_view text, std::int32_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw_invalid("schedule {} is '{}'; it must be a whole number", key, text);
  }
}

void check_range(std::string_view key, std::int32_t value, std::int32_t low, std::int32_t high,
                 std::int32_t step) {
  if (value < low || value > high || value % step != 0) {
    throw_invalid("schedule {} is {}; it must be {} to {}, a multiple of {}", key, value, low, high,
                  step);
  }
}

ScheduleDraws::ScheduleDraws(std::uint64_t seed, std::uint64_t index)
    : state_(mix(seed ^ mix(index))) {}

std::uint64_t ScheduleDraws::operator()(std::uint64_t n) {
  state_ = mix(state_);
  return state_ % n;
}

}  // namespace uniep
