// SPDX-License-Identifier: Apache-2.0
// How the layer is carried out on a GPU: a plain value like Schedule, printable and parsable as
// key=value,…. Every legal one gives the same bits. A new dimension is a field, a line in `apply`
// and one in `to_string`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "uniep/schedule.hpp"

namespace uniep {

struct CudaSchedule {
  Fusion fusion = Fusion::split;         // fused: on tensor cores, push both ways
  Payload payload = Payload::rank;       // a row per (token, destination rank), or per choice
  Direction dispatch = Direction::push;  // who moves dispatched rows
  Direction combine = Direction::push;   // who moves results home
  std::int32_t blocks = 0;      // of a rank for plan, dispatch and combine, 1 to 32; 0: up to 16
  std::int32_t push_warps = 8;  // of the 16 of a dispatch block, 1 to 15; fused of 12, 1 to 11
  std::int32_t chunk = 8;       // tokens that are signalled together, 1 to 4096
  std::int32_t sms = 0;         // for products and activation, 2 to 1024; 0: all

  friend bool operator==(const CudaSchedule&, const CudaSchedule&) = default;
};

[[nodiscard]] std::string to_string(const CudaSchedule& schedule);

// Errors: invalid_argument for an unknown or repeated key or a value outside its range, naming the
// valid ones, and for what is not served.
[[nodiscard]] CudaSchedule parse_cuda_schedule(std::string_view text);

// Errors: invalid_argument with the reason why no shape can run this schedule.
void validate(const CudaSchedule& schedule);

// FNV-1a of to_string: stable across runs and machines.
[[nodiscard]] std::uint64_t hash(const CudaSchedule& schedule);

// Point `index` of a pseudo-random walk, a function of the arguments. Eight points that follow each
// other hold every payload and both directions each way; blocks are 1 to max_blocks. With can_fuse
// sixteen do, and every other one of them is fused.
[[nodiscard]] CudaSchedule sample_cuda_schedule(std::uint64_t seed, std::uint64_t index,
                                                std::int32_t max_blocks, bool can_fuse = false);

}  // namespace uniep
