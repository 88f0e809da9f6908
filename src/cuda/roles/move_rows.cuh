// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine have in common: who a thread is, how a warp copies a row to several
// places at once, and how an operation ends.
#pragma once

#include "cuda/kernels/unroll.hpp"
#include "cuda/split_args.hpp"
#include "cuda/wait.cuh"

namespace uniep::cuda {

inline constexpr std::uint32_t kWholeWarp = 0xFFFFFFFFU;

struct Mover {
  const MoveShape& shape;
  int rank;
  int block;  // of the rank's
  int thread;
  int warp;
  int lane;
  std::uint64_t epoch;

  template <typename T>
  [[nodiscard]] __device__ T* region(int of_rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(shape.group.parts[of_rank] + offset);
  }
  // Of all the rank's warps.
  [[nodiscard]] __device__ int warp_of_rank() const { return block * kMoveWarps + warp; }
  [[nodiscard]] __device__ int warps_of_rank() const { return shape.blocks_per_rank * kMoveWarps; }
};

[[nodiscard]] __device__ __forceinline__ Mover make_mover(const MoveShape& shape) {
  const int rank = shape.first_rank + static_cast<int>(blockIdx.x) / shape.blocks_per_rank;
  return {shape,
          rank,
          static_cast<int>(blockIdx.x) % shape.blocks_per_rank,
          static_cast<int>(threadIdx.x),
          static_cast<int>(threadIdx.x) / 32,
          static_cast<int>(threadIdx.x) % 32,
          control_of(shape.group, rank).epoch + 1};
}

// All threads of a block agree. Nothing may start in a poisoned group.
[[nodiscard]] __device__ __forceinline__ bool may_start(const Mover& m) {
  const RankControl& control = control_of(m.shape.group, m.rank);
  return __syncthreads_or(ptx::load_relaxed_system(&control.abort_word) != 0) == 0;
}

// Until the peers have read all that this operation overwrites.
// All threads of the block call it and agree; false if the group is poisoned.
[[nodiscard]] __device__ inline bool wait_until_consumed(const Mover& m, int threads) {
  const MoveShape& shape = m.shape;
  const std::uint64_t last = control_of(shape.group, m.rank).last_combine;
  const auto* const consumed = m.region<const std::uint64_t>(m.rank, shape.regions.consumed);
  bool failed = false;
  for (int i = m.thread; i < shape.group.num_ranks * shape.blocks_per_rank; i += threads) {
    const int peer = i / shape.blocks_per_rank;
    const int block = i % shape.blocks_per_rank;
    if (peer == m.rank || failed) continue;
    failed = !wait_at_least(shape.group, &consumed[peer * kMaxBlocksPerRank + block], last,
                            {m.rank, WaitStage::dispatch_consumed, peer, block});
  }
  return __syncthreads_or(failed) == 0;
}

// A pointer that lane `from` holds.
template <typename T>
[[nodiscard]] __device__ __forceinline__ T* shuffle(T* pointer, int from) {
  return reinterpret_cast<T*>(
      __shfl_sync(kWholeWarp, reinterpret_cast<std::uint64_t>(pointer), from));
}

// Two values a lane, for up to 64 choices: of choice `lane` and of choice `lane + 32`.
template <typename T>
struct PerChoice {
  T low;
  T high;
};

// Calls body(choice, pointer) with every pointer that is not null, choices ascending; the whole
// warp does.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_pointer(const PerChoice<T*>& pointers, Body body) {
  std::uint32_t mask = __ballot_sync(kWholeWarp, pointers.low != nullptr);
  while (mask != 0) {
    const int choice = __ffs(static_cast<int>(mask)) - 1;
    mask &= mask - 1;
    body(choice, shuffle(pointers.low, choice));
  }
  mask = __ballot_sync(kWholeWarp, pointers.high != nullptr);
  while (mask != 0) {
    const int choice = __ffs(static_cast<int>(mask)) - 1;
    mask &= mask - 1;
    body(choice + 32, shuffle(pointers.high, choice));
  }
}

// Copies a row, once read, to all targets. Unit: uint4, or std::uint16_t where rows are not of
// whole 16 bytes.
template <typename Unit>
__device__ void copy_row(const std::byte* from, std::int64_t row_bytes,
                         const PerChoice<std::byte*>& targets, int lane) {
  constexpr int kInFlight = 8;
  const bool any = targets.low != nullptr || targets.high != nullptr;
  if (__ballot_sync(kWholeWarp, any) == 0) return;
  const auto* const source = reinterpret_cast<const Unit*>(from);
  const auto units = static_cast<int>(row_bytes / static_cast<std::int64_t>(sizeof(Unit)));
  for (int first = lane; first - lane < units; first += 32 * kInFlight) {
    Unit piece[kInFlight];
    UNIEP_UNROLL for (int i = 0; i < kInFlight; ++i) {
      if (first + 32 * i < units) piece[i] = __ldcg(source + first + 32 * i);
    }
    for_each_pointer(targets, [&](int, std::byte* target) {
      Unit* const to = reinterpret_cast<Unit*>(target);
      UNIEP_UNROLL for (int i = 0; i < kInFlight; ++i) {
        if (first + 32 * i < units) to[first + 32 * i] = piece[i];
      }
    });
  }
}

// The blocks of a rank end; block 0 advances the epoch once all of them have read the old one.
__device__ inline void end_operation(const Mover& m, bool failed, WaitStage stage,
                                     bool is_combine) {
  if (__syncthreads_or(failed) != 0) return;
  auto* const done = m.region<std::uint64_t>(m.rank, m.shape.regions.block_done);
  if (m.thread == 0) ptx::store_release_gpu(&done[m.block], m.epoch);
  if (m.block != 0) return;
  if (m.thread < m.shape.blocks_per_rank) {
    failed =
        !wait_at_least(m.shape.group, &done[m.thread], m.epoch, {m.rank, stage, m.rank, m.thread});
  }
  if (__syncthreads_or(failed) != 0 || m.thread != 0) return;
  RankControl& control = control_of(m.shape.group, m.rank);
  if (is_combine) control.last_combine = m.epoch;
  control.epoch = m.epoch;
}

}  // namespace uniep::cuda
