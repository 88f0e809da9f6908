// SPDX-License-Identifier: Apache-2.0
// A schedule: how an operation is carried out, never what it computes. A plain value: printable,
// parsable as key=value,…, comparable. Every legal schedule gives the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "uniep/export.h"

namespace uniep {

enum class Fusion { split, fused };   // stages one after another, or one ticket queue
enum class Payload { choice, rank };  // a row per choice, or per (token, destination rank)
enum class Direction { push, pull };  // who moves dispatched rows; combine always pushes
enum class ExpertOrder { ascending, rotated };       // order of an owner's experts
enum class DestinationOrder { ascending, rotated };  // order of destinations, by source rank
enum class WgradOrder { filling, after };  // weight gradients before or after the final reduce

struct Schedule {
  Fusion fusion = Fusion::fused;
  Payload payload = Payload::rank;
  Direction direction = Direction::push;
  std::int32_t tile_m = 64;   // rows, 8 to 512, a multiple of 8
  std::int32_t tile_n = 128;  // columns, 64 to 1024, a multiple of 64
  ExpertOrder expert_order = ExpertOrder::ascending;
  DestinationOrder destination_order = DestinationOrder::rotated;
  WgradOrder wgrad = WgradOrder::filling;
  std::int32_t workers = 1;       // threads of a rank that stand for SMs, 1 to 256
  std::int32_t comm_workers = 0;  // of these, how many start with moving rows; 0 = no fixed roles
  std::int32_t chunk = 16;        // tokens in one communication task, 1 to 4096

  friend bool operator==(const Schedule&, const Schedule&) = default;
};

[[nodiscard]] UNIEP_API std::string to_string(const Schedule& schedule);

// Starts from `base` and applies "key=value,…". Errors: invalid_argument for an unknown or repeated
// key or a value outside its range, naming the valid ones; also what validate refuses.
[[nodiscard]] UNIEP_API Schedule parse_schedule(std::string_view text, const Schedule& base = {});

// Errors: invalid_argument with the reason why this schedule cannot run.
UNIEP_API void validate(const Schedule& schedule);

// FNV-1a of to_string: stable across runs and machines.
[[nodiscard]] UNIEP_API std::uint64_t hash(const Schedule& schedule);

// Point `index` of a pseudo-random walk through the legal space, a function of (seed, index).
[[nodiscard]] UNIEP_API Schedule sample_schedule(std::uint64_t seed, std::uint64_t index);

}  // namespace uniep
