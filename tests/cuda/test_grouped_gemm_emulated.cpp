// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM's kernels and host code without a GPU. The emulated tensor core adds k ascending
// in fp32, so every element is compared bit for bit with a plain loop that does the same; tiles of
// all widths, few and many clusters, tickets or a stride, and CUDA threads in random order must
// change nothing.
//   test_grouped_gemm_emulated [all]
#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "cuda/formulas.cuh"
#include "cuda/grouped_gemm.hpp"
#include "cuda/ptx/cluster.hpp"
#include "cuda/ptx/mbarrier.hpp"
#include "cuda_host.hpp"
#include "grouped_gemm_refusals.hpp"
#include "uniep/bf16.hpp"
#include "uniep/error.hpp"

namespace uniep::cuda_test {
namespace {

using cuda::ElementType;
using cuda::ExpertRows;
using cuda::GemmLaunch;
using cuda::GemmOp;
using cuda::GroupedGemm;
using cuda::run_grouped_gemm;

// Bits: std::uint16_t is bf16, std::uint32_t fp32.
using Bf16s = std::vector<std::uint16_t>;
using F32s = std::vector<std::uint32_t>;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
float value_of(std::uint16_t bits) { return to_float(Bf16{bits}); }
float value_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
template <typename T>
T bits_of(float value) {
  if constexpr (sizeof(T) == 2) {
    return to_bf16(value).bits;
  } else {
    return std::bit_cast<std::uint32_t>(value);
  }
}

// Where rows lie: of experts, in their padding, or nobody's.
struct Experts {
  std::vector<std::int64_t> rows;
  std::vector<std::int64_t> starts;
  std::vector<int> owner;  // of a row: its expert, kPadding or kNobody
  std::int64_t capacity = 0;
  Buffer<std::int64_t> device_rows, device_starts;

  static constexpr int kPadding = -1, kNobody = -2;

  explicit Experts(const std::vector<std::int64_t>& counts)
      : rows(counts), starts(place(counts)), device_rows(counts), device_starts(starts) {
    for (std::size_t e = 0; e < rows.size(); ++e) {
      owner.insert(owner.end(), at(rows[e]), static_cast<int>(e));
      owner.insert(owner.end(), at((64 - rows[e] % 64) % 64), kPadding);
    }
    owner.insert(owner.end(), 128, kNobody);
    capacity = static_cast<std::int64_t>(owner.size());
  }
  static std::vector<std::int64_t> place(const std::vector<std::int64_t>& counts) {
    std::vector<std::int64_t> starts;
    std::int64_t next = 0;
    for (const std::int64_t count : counts) {
      starts.push_back(next);
      next += (count + 63) / 64 * 64;
    }
    return starts;
  }
  [[nodiscard]] std::int64_t count() const { return static_cast<std::int64_t>(rows.size()); }
  [[nodiscard]] ExpertRows view() const {
    return {device_starts.get(), device_rows.get(), static_cast<int>(rows.size()), capacity};
  }
  [[nodiscard]] std::string text() const {
    std::string list;
    for (const std::int64_t count : rows) list += fmt::format(" {}", count);
    return list;
  }
};

Bf16s random_values(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  Bf16s values(at(count));
  for (std::uint16_t& value : values) value = to_bf16(rng.normal()).bits;
  return values;
}

// Random for rows of experts; padding as asked, and NaN where nobody may look.
Bf16s random_rows(const Experts& experts, std::int64_t columns, std::uint64_t seed,
                  std::uint16_t padding) {
  Bf16s values = random_values(experts.capacity * columns, seed);
  for (std::int64_t row = 0; row < experts.capacity; ++row) {
    const int owner = experts.owner[at(row)];
    if (owner >= 0) continue;
    std::fill_n(values.begin() + row * columns, columns,
                owner == Experts::kPadding ? padding : std::uint16_t{0xFFFF});
  }
  return values;
}

// sum over i of a(i) b(i), ascending from +0.
template <typename A, typename B>
float chain(std::int64_t count, A a, B b) {
  float sum = 0.0F;
  for (std::int64_t i = 0; i < count; ++i) sum += a(i) * b(i);
  return sum;
}

// What an output must hold: of experts' rows get(row, column), zeros as padding, and what it held
// before (0xFF…) where nobody owns the row.
template <typename T, typename Get>
std::vector<T> expected_rows(const Experts& experts, std::int64_t columns, Get get) {
  std::vector<T> values(at(experts.capacity * columns), static_cast<T>(~T{0}));
  for (std::int64_t row = 0; row < experts.capacity; ++row) {
    const int owner = experts.owner[at(row)];
    if (owner == Experts::kNobody) continue;
    for (std::int64_t column = 0; column < columns; ++column) {
      values[at(row * columns + column)] =
          owner < 0 ? T{0} : bits_of<T>(get(row, column, std::int64_t{owner}));
    }
  }
  return values;
}

template <typename T>
std::string difference(const std::vector<T>& want, const Buffer<T>& buffer, std::int64_t columns) {
  const std::vector<T> got = buffer.download();
  std::int64_t wrong = 0, first = -1;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (want[i] == got[i]) continue;
    if (wrong++ == 0) first = static_cast<std::int64_t>(i);
  }
  if (wrong == 0) return "";
  return fmt::format(" {} elements differ, the first in row {} column {} is {}, not {}", wrong,
                     first / columns, first % columns, value_of(got[at(first)]),
                     value_of(want[at(first)]));
}

struct ScheduleCase {
  int num_sms, band;
  bool tickets;
  std::uint64_t order;
};
constexpr ScheduleCase kSchedules[] = {
    {2, 8, false, 0}, {4, 1, true, 1}, {6, 3, true, 2}, {10, 8, false, 3}};

// Runs the problems in every schedule; look() tells what is wrong with the outputs, which reset()
// has poisoned before.
void test_schedules(Report& report, const std::string& what, GemmOp op, ElementType out,
                    const Experts& experts, const std::vector<GroupedGemm>& problems,
                    const std::function<void()>& reset, const std::function<std::string()>& look) {
  std::string wrong;
  const Buffer<std::uint32_t> tickets(std::vector<std::uint32_t>{0});
  for (const ScheduleCase& schedule : kSchedules) {
    reset();
    emulation::order_seed = schedule.order;
    std::string found;
    try {
      run_grouped_gemm(op, ElementType::bf16, out, experts.view(), problems,
                       {.num_sms = schedule.num_sms,
                        .band = schedule.band,
                        .tickets = schedule.tickets ? tickets.get() : nullptr});
      found = look();
      if (tickets.download()[0] != 0) found += " tickets are left";
    } catch (const Error& error) {
      found = error.what();
    }
    emulation::order_seed = 0;
    if (found.empty()) continue;
    wrong = fmt::format(" on {} SMs, band {}{}, order {}: {}", schedule.num_sms, schedule.band,
                        schedule.tickets ? ", tickets" : "", schedule.order, found);
    break;
  }
  report.check(wrong.empty(), what + wrong);
}

std::string title(const char* op, std::int64_t n, std::int64_t k, const Experts& experts) {
  return fmt::format("{} n {} k {} rows{}", op, n, k, experts.text());
}

void test_fprop(Report& report, const Experts& experts, std::int64_t n, std::int64_t k) {
  const Bf16s x = random_rows(experts, k, 1, 0xFFFF);
  const Bf16s w = random_values(experts.count() * n * k, 2);
  const Buffer<std::uint16_t> device_x(x), device_w(w), out(experts.capacity * n);
  GroupedGemm problem{.n = n, .k = k, .x = device_x.get(), .w = device_w.get(), .out = out.get()};
  const Bf16s want = expected_rows<std::uint16_t>(
      experts, n, [&](std::int64_t row, std::int64_t c, std::int64_t e) {
        return chain(
            k, [&](std::int64_t i) { return value_of(x[at(row * k + i)]); },
            [&](std::int64_t i) { return value_of(w[at((e * n + c) * k + i)]); });
      });
  test_schedules(
      report, title("fprop", n, k, experts), GemmOp::fprop, ElementType::bf16, experts, {problem},
      [&] { out.poison(); }, [&] { return difference(want, out, n); });
  if (n % 16 != 0) return;

  const std::int64_t ffn = n / 2;
  std::vector<float> weights(at(experts.capacity));
  Rng rng(3);
  for (float& weight : weights) weight = rng.normal();
  const Buffer<float> device_weights(weights);
  const Buffer<std::uint16_t> a(experts.capacity * ffn);
  const Bf16s want_a = expected_rows<std::uint16_t>(
      experts, ffn, [&](std::int64_t row, std::int64_t c, std::int64_t) {
        return cuda::activation<cuda::StoredBf16>(value_of(want[at(row * n + c)]),
                                                  value_of(want[at(row * n + ffn + c)]),
                                                  weights[at(row)]);
      });
  problem.out = a.get();
  problem.h = out.get();
  problem.row_weights = device_weights.get();
  test_schedules(
      report, title("fprop_swiglu", n, k, experts), GemmOp::fprop_swiglu, ElementType::bf16,
      experts, {problem}, [&] { a.poison(), out.poison(); },
      [&] { return difference(want_a, a, ffn) + difference(want, out, n); });
}

template <typename T>
void test_dgrad(Report& report, const Experts& experts, std::int64_t n, std::int64_t k) {
  const Bf16s d_y = random_rows(experts, n, 4, 0xFFFF);
  const Bf16s w = random_values(experts.count() * n * k, 5);
  const Buffer<std::uint16_t> device_d_y(d_y), device_w(w);
  const Buffer<T> out(experts.capacity * k);
  const GroupedGemm problem{
      .n = n, .k = k, .d_y = device_d_y.get(), .w = device_w.get(), .out = out.get()};
  const auto want =
      expected_rows<T>(experts, k, [&](std::int64_t row, std::int64_t c, std::int64_t e) {
        return chain(
            n, [&](std::int64_t i) { return value_of(d_y[at(row * n + i)]); },
            [&](std::int64_t i) { return value_of(w[at((e * n + i) * k + c)]); });
      });
  test_schedules(
      report, title(sizeof(T) == 2 ? "dgrad" : "dgrad f32", n, k, experts), GemmOp::dgrad,
      sizeof(T) == 2 ? ElementType::bf16 : ElementType::f32, experts, {problem},
      [&] { out.poison(); }, [&] { return difference(want, out, k); });
}

// Into bf16, into fp32, and added to fp32, where an expert without rows leaves its part alone.
template <typename T>
void test_wgrad(Report& report, const Experts& experts, std::int64_t n, std::int64_t k,
                bool accumulate) {
  const Bf16s d_y = random_rows(experts, n, 6, 0);
  const Bf16s x = random_rows(experts, k, 7, 0);
  const Buffer<std::uint16_t> device_d_y(d_y), device_x(x);
  const Buffer<T> out(experts.count() * n * k);
  std::vector<T> before(at(out.count()), static_cast<T>(~T{0}));
  if (accumulate) {
    for (std::size_t i = 0; i < before.size(); ++i) {
      before[i] = bits_of<T>(i % 5 == 0 ? -0.0F : static_cast<float>(i % 7) - 3.0F);
    }
  }
  std::vector<T> want(before.size());
  for (std::int64_t e = 0; e < experts.count(); ++e) {
    const std::int64_t start = experts.starts[at(e)], rows = experts.rows[at(e)];
    for (std::int64_t i = 0; i < n * k; ++i) {
      const float sum = chain(
          rows, [&](std::int64_t row) { return value_of(d_y[at((start + row) * n + i / k)]); },
          [&](std::int64_t row) { return value_of(x[at((start + row) * k + i % k)]); });
      T& to = want[at(e * n * k + i)];
      const T held = before[at(e * n * k + i)];
      to = !accumulate ? bits_of<T>(sum) : rows == 0 ? held : bits_of<T>(value_of(held) + sum);
    }
  }
  const GroupedGemm problem{.n = n,
                            .k = k,
                            .x = device_x.get(),
                            .d_y = device_d_y.get(),
                            .out = out.get(),
                            .accumulate = accumulate};
  test_schedules(
      report,
      title(sizeof(T) == 2 ? "wgrad"
            : accumulate   ? "wgrad added"
                           : "wgrad f32",
            n, k, experts),
      GemmOp::wgrad, sizeof(T) == 2 ? ElementType::bf16 : ElementType::f32, experts, {problem},
      [&] {
        UNIEP_CUDA_CHECK(cudaMemcpy(out.get(), before.data(), before.size() * sizeof(T),
                                    cudaMemcpyHostToDevice));
      },
      [&] { return difference(want, out, k); });
}

// Several problems in one launch, each as if alone.
void test_table(Report& report, const Experts& experts) {
  constexpr std::int64_t kK = 72;
  struct Row {
    Bf16s want;
    Buffer<std::uint16_t> x, w, out;
    std::int64_t n;
  };
  std::vector<std::unique_ptr<Row>> table;
  std::vector<GroupedGemm> problems;
  for (const std::int64_t n : {136, 8, 264}) {
    const auto seed = static_cast<std::uint64_t>(n);
    const Bf16s x = random_rows(experts, kK, seed, 0xFFFF);
    const Bf16s w = random_values(experts.count() * n * kK, seed + 1);
    const auto value = [&](std::int64_t row, std::int64_t c, std::int64_t e) {
      return chain(
          kK, [&](std::int64_t i) { return value_of(x[at(row * kK + i)]); },
          [&](std::int64_t i) { return value_of(w[at((e * n + c) * kK + i)]); });
    };
    table.push_back(
        std::unique_ptr<Row>(new Row{.want = expected_rows<std::uint16_t>(experts, n, value),
                                     .x = Buffer(x),
                                     .w = Buffer(w),
                                     .out = Buffer<std::uint16_t>(experts.capacity * n),
                                     .n = n}));
    const Row& row = *table.back();
    problems.push_back({.n = n, .k = kK, .x = row.x.get(), .w = row.w.get(), .out = row.out.get()});
  }
  test_schedules(
      report, "a table of 3 problems, rows" + experts.text(), GemmOp::fprop, ElementType::bf16,
      experts, problems,
      [&] {
        for (const auto& row : table) row->out.poison();
      },
      [&] {
        std::string wrong;
        for (const auto& row : table) wrong += difference(row->want, row->out, row->n);
        return wrong;
      });
}

void test_all(Report& report, const Experts& experts, std::int64_t n, std::int64_t k) {
  test_fprop(report, experts, n, k);
  test_dgrad<std::uint16_t>(report, experts, n, k);
  test_dgrad<std::uint32_t>(report, experts, n, k);
  test_wgrad<std::uint16_t>(report, experts, n, k, false);
  test_wgrad<std::uint32_t>(report, experts, n, k, false);
  test_wgrad<std::uint32_t>(report, experts, n, k, true);
}

// Kernels that can never end, or that break a rule of an instruction, are errors that say who waits
// where, and the next launch is as if nothing had been.
void test_reports(Report& report) {
  namespace ptx = cuda::ptx;
  const auto told = [](const std::function<void(std::uint32_t)>& kernel) -> std::string {
    try {
      emulation::run_clusters(2, 64, 64, [&] {
        const std::uint32_t barrier = ptx::shared_address(ptx::dynamic_shared());
        if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 2);
        ptx::cluster_sync();
        kernel(barrier);
      });
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const auto expect = [&](const std::string& text, std::initializer_list<const char*> parts) {
    bool found = true;
    for (const char* part : parts) found = found && text.find(part) != std::string::npos;
    report.check(found, "reported: " + text);
  };
  expect(told([](std::uint32_t barrier) {
           const bool second = threadIdx.x >= 32;
           if (ptx::cluster_block_rank() == 0) {
             if (second) ptx::named_barrier_sync(3, 64);
           } else if (second) {
             ptx::mbarrier_wait(barrier, 0);
           } else if (threadIdx.x == 0) {
             ptx::mbarrier_arrive_cluster(barrier);
           }
         }),
         {"a deadlock",
          "block 0 warp 1: 32 threads wait for named barrier 3 (32 of 64 threads are there)",
          "block 1 warp 1: 32 threads wait for ", "1 of 2 arrivals"});
  expect(told([](std::uint32_t barrier) {
           if (blockIdx.x == 1 && threadIdx.x == 40) ptx::mbarrier_arrive_cluster(barrier, 3);
         }),
         {"block 1 thread 40 (warp 1): 3 arrivals at ", "where 2 are pending"});
  expect(told([](std::uint32_t) {
           if (threadIdx.x == 5) static_cast<void>(ptx::load_shared(64));
         }),
         {"thread 5 (warp 0): 4 bytes at shared address 64 of 64"});
  const std::string well = told([](std::uint32_t) { __syncthreads(); });
  report.check(well.empty(), "a launch after these ends " + well);
}

}  // namespace
}  // namespace uniep::cuda_test

int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  const bool all = argc > 1 && std::strcmp(argv[1], "all") == 0;  // minutes
  Report report;
  // One n tile each and widths of 32, 64, …; then two tiles; k tiles that fill the ring and more.
  test_all(report, Experts({0, 33, 1, 0, 97}), 136, 328);
  test_all(report, Experts({129, 0, 300}), 72, 64);
  test_all(report, Experts({5, 200}), 16, 264);
  test_all(report, Experts({0, 0}), 64, 8);
  test_table(report, Experts({70, 0, 3}));
  if (all) {
    const Experts ragged({0, 1, 127, 128, 129, 0, 300, 31, 257, 65, 161, 193, 225});
    for (const auto& [n, k] : {std::pair{128, 128}, {400, 200}, {72, 776}, {776, 72}}) {
      test_all(report, ragged, n, k);
    }
    test_table(report, ragged);
  }
  const Buffer<std::uint16_t> memory(1 << 16);
  for (const Refusal& refusal : try_refusals(memory.get())) {
    report.check(refusal.refused, "refuses " + refusal.what + ": " + refusal.text);
  }
  test_reports(report);
  return report.finish();
}
