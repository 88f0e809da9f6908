// SPDX-License-Identifier: Apache-2.0
#include "simulate/hardware.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.hpp"

namespace uniep::simulate {
namespace {

using nlohmann::json;

constexpr std::size_t kMostBytes = 1 << 20;

struct Scalar {
  const char* name;
  double Hardware::*member;
  double low, high;
  bool is_whole;
};
constexpr double kMostUs = 1e6;
constexpr double kMostRate = 1e9;
constexpr std::array<Scalar, 24> kScalars{{
    {"sms", &Hardware::sms, 2, 1024, true},
    {"shared_bytes", &Hardware::shared_bytes, 1024, 1 << 24, true},
    {"gpus_per_node", &Hardware::gpus_per_node, 1, 1024, true},
    {"mma_step_us", &Hardware::mma_step_us, 1e-6, kMostUs, false},
    {"narrow_share", &Hardware::narrow_share, 0, 1, false},
    {"epilogue_rows_us", &Hardware::epilogue_rows_us, 0, kMostUs, false},
    {"epilogue_swiglu_us", &Hardware::epilogue_swiglu_us, 0, kMostUs, false},
    {"epilogue_wgrad_us", &Hardware::epilogue_wgrad_us, 0, kMostUs, false},
    {"epilogue_f32_us", &Hardware::epilogue_f32_us, 0, kMostUs, false},
    {"epilogue_main_us", &Hardware::epilogue_main_us, 0, kMostUs, false},
    {"tail_share", &Hardware::tail_share, 0, 1, false},
    {"hbm_rate", &Hardware::hbm_rate, 1, kMostRate, false},
    {"launch_us", &Hardware::launch_us, 0, kMostUs, false},
    {"grid_launch_us", &Hardware::grid_launch_us, 0, kMostUs, false},
    {"signal_us", &Hardware::signal_us, 0, kMostUs, false},
    {"warp_read_rate", &Hardware::warp_read_rate, 1, kMostRate, false},
    {"warp_store_rate", &Hardware::warp_store_rate, 1, kMostRate, false},
    {"warp_reduce_rate", &Hardware::warp_reduce_rate, 1, kMostRate, false},
    {"chunk_us", &Hardware::chunk_us, 0, kMostUs, false},
    {"plan_base_us", &Hardware::plan_base_us, 0, kMostUs, false},
    {"plan_pair_us", &Hardware::plan_pair_us, 0, kMostUs, false},
    {"link_short_share", &Hardware::link_short_share, 1e-3, 1, false},
    {"scale_out_rate", &Hardware::scale_out_rate, 1, kMostRate, false},
    {"scale_out_us", &Hardware::scale_out_us, 0, kMostUs, false},
}};
struct Curve {
  const char* name;
  RateCurve Hardware::*member;
};
constexpr std::array<Curve, 2> kCurves{
    {{"link_push", &Hardware::link_push}, {"link_pull", &Hardware::link_pull}}};

// Parses, and refuses a name given twice, which the library would take the last of.
json parse_once(std::string_view text, const std::string& origin) {
  std::vector<std::set<std::string>> seen;
  std::string twice;
  const auto look = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) seen.emplace_back();
    if (event == json::parse_event_t::object_end) seen.pop_back();
    if (event == json::parse_event_t::key &&
        !seen.back().insert(parsed.get<std::string>()).second) {
      if (twice.empty()) twice = parsed.get<std::string>();
    }
    return true;
  };
  json all;
  try {
    all = json::parse(text, look);
  } catch (const json::exception& error) {
    throw_invalid("{} is no JSON: {}", origin, error.what());
  }
  if (!twice.empty()) throw_invalid("{} gives '{}' twice; give it once", origin, twice);
  return all;
}

double number_in(const json& value, const std::string& origin, const std::string& name, double low,
                 double high, bool is_whole) {
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(number >= low && number <= high) || (is_whole && number != std::floor(number))) {
    throw_invalid("{}: {} is {}; it must be a {}number from {} to {}", origin, name, value.dump(),
                  is_whole ? "whole " : "", low, high);
  }
  return number;
}

RateCurve curve_in(const json& value, const std::string& origin, const std::string& name) {
  std::vector<std::pair<double, double>> points;
  bool ok = value.is_array() && !value.empty() && value.size() <= 64;
  for (std::size_t i = 0; ok && i < value.size(); ++i) {
    ok = value[i].is_array() && value[i].size() == 2;
    if (!ok) break;
    const double warps = number_in(value[i][0], origin, name + " warps", 1, 1e6, true);
    const double rate = number_in(value[i][1], origin, name + " rate", 1, kMostRate, false);
    ok = points.empty() || (warps > points.back().first && rate >= points.back().second);
    points.emplace_back(warps, rate);
  }
  if (!ok) {
    throw_invalid(
        "{}: {} is {}; it must be 1 to 64 pairs [warps, bytes per microsecond], warps rising and "
        "rates not falling",
        origin, name, value.dump());
  }
  return RateCurve(std::move(points));
}

std::string all_names() {
  std::string text;
  for (const Scalar& s : kScalars) text += std::string(text.empty() ? "" : ", ") + s.name;
  for (const Curve& c : kCurves) text += std::string(", ") + c.name;
  return text;
}

}  // namespace

double RateCurve::at(double warps) const {
  double last_warps = 0, last_rate = 0;
  for (const auto& [point, rate] : points_) {
    if (warps <= point) {
      return last_rate + (rate - last_rate) * (warps - last_warps) / (point - last_warps);
    }
    last_warps = point;
    last_rate = rate;
  }
  return last_rate;
}

Hardware parse_hardware(std::string_view text, const std::string& origin) {
  if (text.size() > kMostBytes) {
    throw_invalid("{} has {} bytes; a hardware profile has at most {}", origin, text.size(),
                  kMostBytes);
  }
  const json all = parse_once(text, origin);
  if (!all.is_object() || !all.contains("uniep_hardware")) {
    throw_invalid("{} is no hardware profile; it must be an object with uniep_hardware = {}",
                  origin, kHardwareVersion);
  }
  if (all["uniep_hardware"] != kHardwareVersion) {
    throw_invalid("{}: uniep_hardware is {}; this build reads {}", origin,
                  all["uniep_hardware"].dump(), kHardwareVersion);
  }
  for (const auto& [key, value] : all.items()) {
    if (key != "uniep_hardware" && key != "name" && key != "figures") {
      throw_invalid("{}: '{}' is unknown; a profile has uniep_hardware, name and figures", origin,
                    key);
    }
  }
  if (!all.contains("name") || !all["name"].is_string() || all["name"] == "") {
    throw_invalid("{}: name must be there and be a text", origin);
  }
  if (!all.contains("figures") || !all["figures"].is_object()) {
    throw_invalid("{}: figures must be there and be an object", origin);
  }
  Hardware hardware;
  hardware.name = all["name"];
  const json& figures = all["figures"];
  for (const auto& [key, entry] : figures.items()) {
    const auto is_named = [&name = key](const auto& known) { return name == known.name; };
    if (std::none_of(kScalars.begin(), kScalars.end(), is_named) &&
        std::none_of(kCurves.begin(), kCurves.end(), is_named)) {
      throw_invalid("{}: figure '{}' is unknown; figures are {}", origin, key, all_names());
    }
    if (!entry.is_object() || entry.size() != 2 || !entry.contains("value") ||
        !entry.contains("source") || !entry["source"].is_string()) {
      throw_invalid("{}: figure {} is {}; it must have a value and a source", origin, key,
                    entry.dump());
    }
    const auto source = entry["source"].get<std::string>();
    const bool is_known = source.starts_with("measured: ") || source.starts_with("vendor: ") ||
                          source.starts_with("estimate: ");
    if (!is_known) {
      throw_invalid(
          "{}: the source of {} is '{}'; it must begin with 'measured: ', 'vendor: ' or "
          "'estimate: '",
          origin, key, source);
    }
    hardware.sources[key] = source;
  }
  const auto value_of = [&](const std::string& name) -> const json& {
    if (!figures.contains(name)) {
      throw_invalid("{}: figure {} is missing; figures are {}", origin, name, all_names());
    }
    return figures[name]["value"];
  };
  for (const Scalar& s : kScalars) {
    hardware.*s.member = number_in(value_of(s.name), origin, s.name, s.low, s.high, s.is_whole);
  }
  for (const Curve& c : kCurves) {
    hardware.*c.member = curve_in(value_of(c.name), origin, c.name);
  }
  return hardware;
}

Hardware load_hardware(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMostBytes + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad() || (!file.is_open()) || file.gcount() == 0) {
    throw_invalid("hardware profile '{}' cannot be read; give a JSON file such as hw/h200.json",
                  path);
  }
  text.resize(static_cast<std::size_t>(file.gcount()));
  return parse_hardware(text, "hardware profile '" + path + "'");
}

double& figure(Hardware& hardware, std::string_view name) {
  for (const Scalar& s : kScalars) {
    if (name == s.name) return hardware.*s.member;
  }
  throw_invalid("figure '{}' is unknown; figures are {}", name, all_names());
}

std::vector<std::string> figure_names() {
  std::vector<std::string> names;
  for (const Scalar& s : kScalars) names.emplace_back(s.name);
  return names;
}

}  // namespace uniep::simulate
