// SPDX-License-Identifier: Apache-2.0
#include "timeline/ceilings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "base/rng.hpp"
#include "cpu/formulas.hpp"
#include "cpu/gemm.hpp"

namespace uniep {
namespace {

constexpr int kRounds = 12;
constexpr std::chrono::milliseconds kRound{
    10};  // short: the best one is little disturbed by other work
constexpr std::size_t kCopyBytes = std::size_t{32} << 20;  // more than a core's cache holds
constexpr std::int64_t kMostHidden = 4096;                 // a longer contraction is no faster

// Amounts per second over all threads, the best round; `step` does some work and says how much.
double best_rate(int threads, const std::function<std::function<double()>(int thread)>& make_step) {
  using Clock = std::chrono::steady_clock;
  std::vector<std::function<double()>> steps;
  for (int i = 0; i < threads; ++i) steps.push_back(make_step(i));
  double best = 0;
  std::vector<double> rates(static_cast<std::size_t>(threads));
  const auto work = [&](std::size_t thread) {
    const auto start = Clock::now();
    double amount = 0;
    auto now = start;
    while (now - start < kRound) {
      amount += steps[thread]();
      now = Clock::now();
    }
    rates[thread] = amount / std::chrono::duration<double>(now - start).count();
  };
  for (int round = 0; round < kRounds; ++round) {
    {
      std::vector<std::jthread> others;
      for (std::size_t i = 1; i < rates.size(); ++i) others.emplace_back(work, i);
      work(0);
    }
    double sum = 0;
    for (const double rate : rates) sum += rate;
    best = std::max(best, sum);
  }
  return best;
}

template <typename S>
std::vector<S> random_values(std::int64_t count, std::uint64_t stream) {
  Rng rng(1, stream);
  std::vector<S> values(static_cast<std::size_t>(count));
  for (S& value : values) value = cpu::narrow<S>(rng.normal());
  return values;
}

template <typename S>
double flops_per_s(const Schedule& schedule, std::int64_t k, int threads) {
  return best_rate(threads, [&](int thread) {
    const std::int64_t m = schedule.tile_m, n = schedule.tile_n;
    const auto stream = static_cast<std::uint64_t>(2 * thread);
    return [=, a = random_values<S>(m * k, stream), b = random_values<S>(n * k, stream + 1),
            c = std::vector<float>(static_cast<std::size_t>(m * n)),
            scratch = cpu::GemmScratch{}]() mutable {
      cpu::gemm_tile(cpu::MatrixView<S>{a.data(), k, 1}, cpu::MatrixView<S>{b.data(), 1, k}, m, n,
                     k, c.data(), n, scratch);
      return 2.0 * static_cast<double>(m * n * k);
    };
  });
}

double bytes_per_s(std::size_t row_bytes, int threads) {
  return best_rate(threads, [&](int) {
    return [row_bytes, from = std::vector<std::byte>(kCopyBytes, std::byte{1}),
            to = std::vector<std::byte>(kCopyBytes, std::byte{2}), at = std::size_t{0}]() mutable {
      double bytes = 0;
      for (int i = 0; i < 64; ++i, at += row_bytes) {
        if (at + row_bytes > kCopyBytes) at = 0;
        std::memcpy(to.data() + at, from.data() + at, row_bytes);
        bytes += static_cast<double>(row_bytes);
      }
      return bytes;
    };
  });
}

}  // namespace

Ceilings measure_ceilings(const Schedule& schedule, DType dtype, std::int64_t hidden,
                          int num_workers) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int threads = std::min(cores, num_workers);
  const std::int64_t k = std::clamp<std::int64_t>(hidden, 1, kMostHidden);
  const std::size_t element = dtype == DType::bf16 ? 2 : 4;
  const std::size_t row_bytes = std::min(kCopyBytes, static_cast<std::size_t>(hidden) * element);
  return {.flops_per_s = dtype == DType::bf16 ? flops_per_s<Bf16>(schedule, k, threads)
                                              : flops_per_s<float>(schedule, k, threads),
          .link_bytes_per_s = bytes_per_s(row_bytes, threads),
          .origin =
              fmt::format("measured on {} thread{} just before", threads, threads == 1 ? "" : "s")};
}

}  // namespace uniep
