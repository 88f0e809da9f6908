// SPDX-License-Identifier: Apache-2.0
// The one way a kernel waits for other blocks and ranks: bounded, ended early when any rank of the
// group failed, and reporting who waited for what. Nothing traps; whoever gets false returns.
#pragma once

#include <cstdint>

#include "cuda/ptx/signal.hpp"
#include "cuda/symmetric_memory.hpp"

namespace uniep::cuda {

__device__ __forceinline__ RankControl& control_of(const GroupView& group, int rank) {
  return *reinterpret_cast<RankControl*>(group.parts[rank]);
}

// Ends all waits of the group. The first report is kept, in every part, so that each rank can tell
// it; then the abort words go up.
__device__ inline void poison(const GroupView& group, const WaitReport& report) {
  auto* claim = reinterpret_cast<unsigned long long*>(&control_of(group, 0).report_claim);
  const auto mine = static_cast<unsigned long long>(report.rank) + 1;
  if (atomicCAS_system(claim, 0ULL, mine) != 0) return;
  for (int rank = 0; rank < group.num_ranks; ++rank) {
    RankControl& control = control_of(group, rank);
    control.report = report;
    ptx::store_release_system(&control.abort_word, mine);
  }
}

struct WaitSite {
  int rank;
  WaitStage stage;
  int peer;
  int block;
};

// True once *word >= expected; what its writer wrote before is then visible to this thread. False
// if the group is poisoned, by this wait's expiry or by another's.
__device__ inline bool wait_at_least(const GroupView& group, const std::uint64_t* word,
                                     std::uint64_t expected, const WaitSite& site) {
  constexpr int kLooks = 16;  // at the word before one at the clock and at the abort word
  std::uint64_t seen = ptx::load_acquire_system(word);
  if (seen >= expected) return true;
  const std::uint64_t start = ptx::global_timer();
  for (;;) {
    for (int look = 0; look < kLooks; ++look) {
      seen = ptx::load_acquire_system(word);
      if (seen >= expected) return true;
    }
    if (ptx::load_acquire_system(&control_of(group, site.rank).abort_word) != 0) return false;
    const std::uint64_t waited = ptx::global_timer() - start;
    if (waited > group.bound_ns) {
      poison(group, {site.rank, static_cast<std::int32_t>(site.stage), site.peer, site.block,
                     expected, seen, waited});
      return false;
    }
  }
}

}  // namespace uniep::cuda
