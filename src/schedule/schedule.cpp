// SPDX-License-Identifier: Apache-2.0
#include "uniep/schedule.hpp"

#include <array>
#include <span>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "schedule/key_values.hpp"

namespace uniep {
namespace {

// Names in the order of the enumerators: value i of an enum prints as names[i].
constexpr std::array<std::string_view, 2> kFusions{"split", "fused"};
constexpr std::array<std::string_view, 2> kPayloads{"choice", "rank"};
constexpr std::array<std::string_view, 2> kDirections{"push", "pull"};
constexpr std::array<std::string_view, 2> kOrders{"ascending", "rotated"};
constexpr std::array<std::string_view, 2> kWgrads{"filling", "after"};

void apply(std::string_view key, std::string_view text, Schedule& schedule) {
  if (key == "fusion") return parse_enum(key, text, kFusions, schedule.fusion);
  if (key == "payload") return parse_enum(key, text, kPayloads, schedule.payload);
  if (key == "direction") return parse_enum(key, text, kDirections, schedule.direction);
  if (key == "tile_m") return parse_int(key, text, schedule.tile_m);
  if (key == "tile_n") return parse_int(key, text, schedule.tile_n);
  if (key == "expert_order") return parse_enum(key, text, kOrders, schedule.expert_order);
  if (key == "destination_order") return parse_enum(key, text, kOrders, schedule.destination_order);
  if (key == "wgrad") return parse_enum(key, text, kWgrads, schedule.wgrad);
  if (key == "workers") return parse_int(key, text, schedule.workers);
  if (key == "comm_workers") return parse_int(key, text, schedule.comm_workers);
  if (key == "chunk") return parse_int(key, text, schedule.chunk);
  throw_invalid(
      "schedule key '{}' is not served on this backend; keys are fusion, payload, direction, "
      "tile_m, tile_n, expert_order, destination_order, wgrad, workers, comm_workers, chunk",
      key);
}

}  // namespace

std::string to_string(const Schedule& s) {
  return fmt::format(
      "fusion={},payload={},direction={},tile_m={},tile_n={},expert_order={},destination_order={},"
      "wgrad={},workers={},comm_workers={},chunk={}",
      name_of(s.fusion, kFusions), name_of(s.payload, kPayloads), name_of(s.direction, kDirections),
      s.tile_m, s.tile_n, name_of(s.expert_order, kOrders), name_of(s.destination_order, kOrders),
      name_of(s.wgrad, kWgrads), s.workers, s.comm_workers, s.chunk);
}

Schedule parse_schedule(std::string_view text, const Schedule& base) {
  Schedule schedule = base;
  for_each_item(text, [&schedule](std::string_view key, std::string_view value) {
    apply(key, value, schedule);
  });
  validate(schedule);
  return schedule;
}

void validate(const Schedule& s) {
  check_range("tile_m", s.tile_m, 8, 512, 8);
  check_range("tile_n", s.tile_n, 64, 1024, 64);
  check_range("workers", s.workers, 1, 256, 1);
  check_range("comm_workers", s.comm_workers, 0, 255, 1);
  check_range("chunk", s.chunk, 1, 4096, 1);
  if (s.comm_workers >= s.workers) {
    throw_invalid(
        "schedule comm_workers is {} with workers = {}; at least one worker must be left to "
        "multiply, or the communication it feeds waits for ever",
        s.comm_workers, s.workers);
  }
}

std::uint64_t hash(const Schedule& schedule) {
  const std::string text = to_string(schedule);
  return fnv1a(std::as_bytes(std::span(text)));
}

Schedule sample_schedule(std::uint64_t seed, std::uint64_t index) {
  ScheduleDraws draw(seed, index);
  constexpr std::array<std::int32_t, 6> kTileM{8, 16, 32, 64, 128, 192};
  constexpr std::array<std::int32_t, 3> kTileN{64, 128, 192};
  constexpr std::array<std::int32_t, 4> kChunk{1, 3, 16, 64};
  Schedule s;
  s.fusion = static_cast<Fusion>(draw(2));
  s.payload = static_cast<Payload>(draw(2));
  s.direction = static_cast<Direction>(draw(2));
  s.tile_m = kTileM[draw(kTileM.size())];
  s.tile_n = kTileN[draw(kTileN.size())];
  s.expert_order = static_cast<ExpertOrder>(draw(2));
  s.destination_order = static_cast<DestinationOrder>(draw(2));
  s.wgrad = static_cast<WgradOrder>(draw(2));
  s.workers = static_cast<std::int32_t>(1 + draw(3));
  s.comm_workers = static_cast<std::int32_t>(draw(static_cast<std::uint64_t>(s.workers)));
  s.chunk = kChunk[draw(kChunk.size())];
  return s;
}

}  // namespace uniep
