// SPDX-License-Identifier: Apache-2.0
#include "memory/wait.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "memory/signal.hpp"

namespace uniep {
namespace {

constexpr int kSpins = 64;
constexpr int kYields = 256;
constexpr std::chrono::microseconds kLongestSleep{100};

std::string describe(const WaitSite& site, std::uint64_t expected, std::uint64_t seen,
                     std::chrono::nanoseconds waited) {
  std::string text = fmt::format(
      "rank {} waited {} ms in stage {}, role {}", site.rank,
      std::chrono::duration_cast<std::chrono::milliseconds>(waited).count(), site.stage, site.role);
  if (site.peer >= 0) text += fmt::format(", for rank {}", site.peer);
  if (site.expert >= 0) text += fmt::format(", expert {}", site.expert);
  if (site.tile >= 0) text += fmt::format(", tile {}", site.tile);
  return text + fmt::format(": expected {}, seen {}", expected, seen);
}

void write_report(GroupState& state, int rank, const std::string& text) {
  const std::size_t length = std::min(text.size(), GroupState::kReportBytes - 1);
  std::memcpy(state.report, text.data(), length);
  state.report[length] = 0;
  state.abort_word.store(static_cast<std::uint64_t>(rank) + 1, std::memory_order_release);
}

}  // namespace

void pause_for(int round) {
  if (round < kSpins) return;
  if (round < kSpins + kYields) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(
      std::min(kLongestSleep, std::chrono::microseconds(round - kSpins - kYields + 1)));
}

void throw_if_aborted(GroupState& state, int rank) {
  if (const auto failure = failure_of(state)) {
    throw_world("rank {} stopped because the group failed: {}", rank, *failure);
  }
}

void expire(GroupState& state, const Awaited& awaited, std::chrono::nanoseconds waited) {
  const std::string text =
      describe(awaited.site, awaited.expected, read_acquire(awaited.word), waited);
  abort_group(state, awaited.site.rank, text);
  throw_world("{}", text);
}

void abort_group(GroupState& state, int rank, const std::string& text) {
  const auto mine = static_cast<std::uint64_t>(rank) + 1;
  std::uint64_t nobody = 0;
  if (state.report_claim.compare_exchange_strong(nobody, mine)) write_report(state, rank, text);
}

void abort_for_lost_rank(GroupState& state, int rank, const std::string& text) {
  const auto lost = static_cast<std::uint64_t>(rank) + 1;
  std::uint64_t claim = 0;
  if (state.report_claim.compare_exchange_strong(claim, lost) ||
      (claim == lost && state.abort_word.load() == 0)) {
    write_report(state, rank, text);
  }
}

std::optional<std::string> failure_of(GroupState& state) {
  if (state.abort_word.load(std::memory_order_acquire) == 0) return std::nullopt;
  return std::string(state.report);
}

void wait_at_least(GroupState& state, std::uint64_t* word, std::uint64_t expected,
                   const WaitSite& site) {
  if (read_acquire(word) >= expected) return;
  auto start = std::chrono::steady_clock::now();
  std::uint64_t progress = state.progress.load(std::memory_order_relaxed);
  for (int round = 0;; ++round) {
    if (read_acquire(word) >= expected) return;
    throw_if_aborted(state, site.rank);
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited > state.bound) {
      const std::uint64_t now = state.progress.load(std::memory_order_relaxed);
      if (now != progress) {
        progress = now;
        start = std::chrono::steady_clock::now();
        continue;
      }
      expire(state, {word, expected, site}, waited);
    }
    pause_for(round);
  }
}

std::uint64_t recover(GroupState& state, int rank) {
  const auto ranks = static_cast<std::uint64_t>(state.num_ranks);
  const std::uint64_t mine =
      std::atomic_ref<std::uint64_t>(state.arrived).fetch_add(1, std::memory_order_acq_rel) + 1;
  const std::uint64_t next = (mine + ranks - 1) / ranks;
  if (mine == next * ranks) {
    state.report[0] = 0;
    // In this order: a new claim must find the old failure gone.
    state.abort_word.store(0, std::memory_order_relaxed);
    state.report_claim.store(0, std::memory_order_release);
    raise(&state.generation, next);
    return next;
  }
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; read_acquire(&state.generation) < next; ++round) {
    if (std::chrono::steady_clock::now() - start > state.bound) {
      // Leaves as it came, unless the last rank arrived meanwhile.
      const std::uint64_t seen = read_acquire(&state.generation);
      if (seen >= next) break;
      std::uint64_t count = read_acquire(&state.arrived);
      while (count < next * ranks &&
             !std::atomic_ref<std::uint64_t>(state.arrived)
                  .compare_exchange_weak(count, count - 1, std::memory_order_acq_rel)) {
      }
      if (count >= next * ranks) continue;
      throw_world("rank {} waited {} ms in recover: {} of {} ranks came", rank,
                  std::chrono::duration_cast<std::chrono::milliseconds>(state.bound).count(),
                  count - (next - 1) * ranks, ranks);
    }
    pause_for(round);
  }
  return next;
}

}  // namespace uniep
