// SPDX-License-Identifier: Apache-2.0
#include "schedule/cuda_schedule.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "schedule/key_values.hpp"

namespace uniep {
namespace {

constexpr std::array<std::string_view, 2> kFusions{"split", "fused"};
constexpr std::array<std::string_view, 2> kPayloads{"choice", "rank"};
constexpr std::array<std::string_view, 2> kDirections{"push", "pull"};

void apply(std::string_view key, std::string_view text, CudaSchedule& s) {
  if (key == "fusion") return parse_enum(key, text, kFusions, s.fusion);
  if (key == "payload") return parse_enum(key, text, kPayloads, s.payload);
  if (key == "dispatch") return parse_enum(key, text, kDirections, s.dispatch);
  if (key == "combine") return parse_enum(key, text, kDirections, s.combine);
  if (key == "blocks") return parse_int(key, text, s.blocks);
  if (key == "push_warps") return parse_int(key, text, s.push_warps);
  if (key == "chunk") return parse_int(key, text, s.chunk);
  if (key == "sms") return parse_int(key, text, s.sms);
  throw_invalid(
      "schedule key '{}' is not served on this backend; keys are fusion, payload, dispatch, "
      "combine, blocks, push_warps, chunk, sms",
      key);
}

}  // namespace

void validate(const CudaSchedule& s) {
  check_range("blocks", s.blocks, 0, 32, 1);
  if (s.fusion == Fusion::fused &&
      (s.dispatch == Direction::pull || s.combine == Direction::pull)) {
    throw_invalid("schedule fusion=fused pushes rows, and {} is pull; fusion=split takes both",
                  s.dispatch == Direction::pull ? "dispatch" : "combine");
  }
  check_range("push_warps", s.push_warps, 1, s.fusion == Fusion::fused ? 11 : 15, 1);
  check_range("chunk", s.chunk, 1, 4096, 1);
  check_range("sms", s.sms, 0, 1024, 1);
  if (s.sms == 1) throw_invalid("schedule sms is 1; it must be 2 to 1024, or 0 for all");
}

std::uint64_t hash(const CudaSchedule& schedule) {
  const std::string text = to_string(schedule);
  return fnv1a(std::as_bytes(std::span(text)));
}

std::string to_string(const CudaSchedule& s) {
  return fmt::format(
      "fusion={},payload={},dispatch={},combine={},blocks={},push_warps={},chunk={},sms={}",
      name_of(s.fusion, kFusions), name_of(s.payload, kPayloads), name_of(s.dispatch, kDirections),
      name_of(s.combine, kDirections), s.blocks, s.push_warps, s.chunk, s.sms);
}

CudaSchedule parse_cuda_schedule(std::string_view text) {
  CudaSchedule schedule;
  for_each_item(text, [&schedule](std::string_view key, std::string_view value) {
    apply(key, value, schedule);
  });
  validate(schedule);
  return schedule;
}

CudaSchedule sample_cuda_schedule(std::uint64_t seed, std::uint64_t index, std::int32_t max_blocks,
                                  bool can_fuse) {
  constexpr std::array<std::int32_t, 5> kPushWarps{1, 4, 8, 12, 15};
  constexpr std::array<std::int32_t, 6> kChunk{1, 3, 5, 8, 16, 64};
  ScheduleDraws draw(seed, index);
  CudaSchedule s;
  if (can_fuse) {
    s.fusion = (index & 1) != 0 ? Fusion::fused : Fusion::split;
    index >>= 1;
  }
  s.payload = (index & 1) != 0 ? Payload::choice : Payload::rank;
  if (s.fusion == Fusion::split) {
    s.dispatch = (index & 2) != 0 ? Direction::pull : Direction::push;
    s.combine = (index & 4) != 0 ? Direction::pull : Direction::push;
  }
  const auto most = static_cast<std::uint64_t>(std::clamp(max_blocks, 1, 32));
  s.blocks = static_cast<std::int32_t>(1 + draw(most));
  // The last two are for the split dispatch alone, whose blocks have more warps.
  s.push_warps = kPushWarps[draw(kPushWarps.size() - (s.fusion == Fusion::fused ? 2 : 0))];
  s.chunk = kChunk[draw(kChunk.size())];
  return s;
}

}  // namespace uniep
