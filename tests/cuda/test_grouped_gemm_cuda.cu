// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM against float64, its promises about padding, and its promises about bits.
//   test_grouped_gemm_cuda [quick]
#include <algorithm>
#include <cstring>
#include <memory>

#include "cuda/grouped_gemm.hpp"
#include "cuda_test.cuh"
#include "grouped_gemm_refusals.hpp"

namespace {

using namespace uniep::cuda;
using namespace uniep::cuda_test;

struct Layout {
  std::vector<std::int64_t> rows, starts;
  std::int64_t end = 0;  // of the last expert's padding
  std::int64_t capacity = 0;
};

Layout make_layout(const std::vector<std::int64_t>& rows) {
  Layout layout{rows, {}, 0, 0};
  for (const std::int64_t count : rows) {
    layout.starts.push_back(layout.end);
    layout.end += (count + 63) / 64 * 64;
  }
  layout.capacity = layout.end + 192;  // rows that belong to nobody
  return layout;
}

// Device copies of a layout and of what each row is: its expert, or -1 for padding, -2 for
// nobody's.
struct Experts {
  Layout layout;
  Buffer<std::int64_t> starts, rows;
  Buffer<std::int32_t> owner;

  explicit Experts(const Layout& l) : layout(l), starts(l.starts), rows(l.rows), owner(owners(l)) {}

  static std::vector<std::int32_t> owners(const Layout& l) {
    std::vector<std::int32_t> owner(static_cast<std::size_t>(l.capacity), -2);
    for (std::size_t e = 0; e < l.rows.size(); ++e) {
      for (std::int64_t r = 0; r < (l.rows[e] + 63) / 64 * 64; ++r) {
        owner[static_cast<std::size_t>(l.starts[e] + r)] =
            r < l.rows[e] ? static_cast<std::int32_t>(e) : -1;
      }
    }
    return owner;
  }
  [[nodiscard]] ExpertRows view() const {
    return {starts.get(), rows.get(), static_cast<int>(layout.rows.size()), layout.capacity};
  }
};

enum class Padding { nan, zero };

// Rows that belong to an expert get random values, padding as asked, rows of nobody NaN.
template <typename T>
__global__ void fill_rows_kernel(T* data, const std::int32_t* owner, std::int64_t columns,
                                 std::uint64_t seed, bool zero_padding) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    const float nan = __int_as_float(0x7FFFFFFF);
    const float other = owner[row] == -1 && zero_padding ? 0.0F : nan;
    put(data[row * columns + c], owner[row] >= 0 ? random_normal(seed, row * columns + c) : other);
  }
}

template <typename T>
void fill_rows(const Buffer<T>& buffer, const Experts& experts, std::int64_t columns,
               std::uint64_t seed, Padding padding) {
  fill_rows_kernel<<<static_cast<unsigned>(experts.layout.capacity), 256>>>(
      buffer.get(), experts.owner.get(), columns, seed, padding == Padding::zero);
}

// What a comparison found. An error is measured against its bound; a NaN counts as infinitely
// wrong.
struct Found {
  unsigned long long wrong;      // past the bound
  unsigned long long padding;    // padding that is not exactly +0
  unsigned long long untouched;  // rows of nobody that were written
  unsigned int worst;            // largest error / bound, as the bits of a float
};

template <typename T>
__device__ void judge(T actual, double expected, double magnitude, std::int64_t chain, Found* found,
                      double floor = 1e-37) {
  // Half a unit of the output type, and for each k16 step an fp32 unit of what is summed.
  const double unit = sizeof(T) == 2 ? 0x1p-8 : 0x1p-24;
  const double bound = unit * 1.001 * fabs(expected) +
                       static_cast<double>(chain / 16 + 4) * 0x1p-22 * magnitude + floor;
  const double ratio = fabs(get(actual) - expected) / bound;
  if (!(ratio <= 1.0)) atomicAdd(&found->wrong, 1ULL);
  atomicMax(&found->worst, __float_as_uint(isnan(ratio) ? 1e30F : static_cast<float>(ratio)));
}

// out [capacity, m] = b [capacity, k] * w_e, where w_e(m, k) = w[e * m * k + m * stride_m + k *
// stride_k].
template <typename T>
__global__ void check_rows_kernel(const T* out, const bf16* b, const bf16* w,
                                  const std::int32_t* owner, std::int64_t first_row,
                                  std::int64_t num_m, std::int64_t num_k, std::int64_t stride_m,
                                  std::int64_t stride_k, Found* found) {
  const std::int64_t row = first_row + blockIdx.x;
  for (std::int64_t m = threadIdx.x; m < num_m; m += blockDim.x) {
    const T actual = out[row * num_m + m];
    const bool nan_bits = sizeof(T) == 2
                              ? *reinterpret_cast<const std::uint16_t*>(&actual) == 0xFFFF
                              : *reinterpret_cast<const std::uint32_t*>(&actual) == 0xFFFFFFFF;
    const bool zero_bits = get(actual) == 0.0 && !signbit(get(actual));
    if (owner[row] == -1 && !zero_bits) atomicAdd(&found->padding, 1ULL);
    if (owner[row] == -2 && !nan_bits) atomicAdd(&found->untouched, 1ULL);
    if (owner[row] < 0) continue;
    const bf16* weights = w + owner[row] * num_m * num_k + m * stride_m;
    double sum = 0, magnitude = 0;
    for (std::int64_t k = 0; k < num_k; ++k) {
      const double product = get(b[row * num_k + k]) * get(weights[k * stride_k]);
      sum += product;
      magnitude += fabs(product);
    }
    judge(actual, sum, magnitude, num_k, found);
  }
}

// out [num_experts, n, k] = d_y [rows of e, n]^T x [rows of e, k], a block a row of out.
template <typename T>
__global__ void check_grad_kernel(const T* out, const bf16* d_y, const bf16* x,
                                  const std::int64_t* starts, const std::int64_t* rows,
                                  std::int64_t num_n, std::int64_t num_k, std::int64_t stride_n,
                                  Found* found) {
  const std::int64_t expert = blockIdx.y;
  const std::int64_t n = blockIdx.x * stride_n;
  for (std::int64_t k = threadIdx.x; k < num_k; k += blockDim.x) {
    double sum = 0, magnitude = 0;
    for (std::int64_t r = starts[expert]; r < starts[expert] + rows[expert]; ++r) {
      const double product = get(d_y[r * num_n + n]) * get(x[r * num_k + k]);
      sum += product;
      magnitude += fabs(product);
    }
    judge(out[(expert * num_n + n) * num_k + k], sum, magnitude, rows[expert], found);
  }
}

// a [capacity, ffn] from the rounded h [capacity, 2 * ffn].
__global__ void check_activation_kernel(const bf16* a, const bf16* h, const float* weights,
                                        const std::int32_t* owner, std::int64_t ffn, Found* found) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t f = threadIdx.x; f < ffn; f += blockDim.x) {
    const bf16 actual = a[row * ffn + f];
    const std::uint16_t bits = *reinterpret_cast<const std::uint16_t*>(&actual);
    if (owner[row] == -1 && bits != 0) atomicAdd(&found->padding, 1ULL);
    if (owner[row] == -2 && bits != 0xFFFF) atomicAdd(&found->untouched, 1ULL);
    if (owner[row] < 0) continue;
    const double g = get(h[row * 2 * ffn + f]);
    const double scale = get(h[row * 2 * ffn + ffn + f]) * weights[row];
    const double value = g / (1 + exp(-g)) * scale;
    // For g below -87 the denominator's reciprocal is subnormal and counts as zero.
    judge(actual, value, fabs(value), 16, found, 1.1e-36 * fabs(scale) + 1e-37);
  }
}

class Finding {
 public:
  Finding() : buffer_(std::vector<Found>{Found{}}) {}
  [[nodiscard]] Found* get() const { return buffer_.get(); }
  void report(Report& report, const std::string& what) const {
    const Found f = buffer_.download()[0];
    float worst;
    std::memcpy(&worst, &f.worst, sizeof(worst));
    char text[160];
    std::snprintf(text, sizeof(text),
                  ": worst error / bound %.3f, wrong %llu, padding %llu, "
                  "beyond %llu",
                  static_cast<double>(worst), f.wrong, f.padding, f.untouched);
    report.check(f.wrong == 0 && f.padding == 0 && f.untouched == 0, what + text);
  }

 private:
  Buffer<Found> buffer_;
};

void run(GemmOp op, ElementType out, const Experts& experts, const GroupedGemm& problem,
         const GemmLaunch& launch = {}) {
  run_grouped_gemm(op, ElementType::bf16, out, experts.view(), {&problem, 1}, launch);
  UNIEP_CUDA_CHECK(cudaDeviceSynchronize());
}

std::string describe(const char* op, std::int64_t n, std::int64_t k, const Layout& layout) {
  std::string text =
      std::string(op) + " n " + std::to_string(n) + " k " + std::to_string(k) + " rows";
  for (std::size_t i = 0; i < std::min<std::size_t>(layout.rows.size(), 9); ++i) {
    text += " " + std::to_string(layout.rows[i]);
  }
  return text + (layout.rows.size() > 9 ? " ..." : "");
}

// The schedule must change no bits, and a launch must leave its ticket counter at 0.
struct ScheduleCase {
  int num_sms, band;
  bool tickets;
};
constexpr ScheduleCase kSchedules[] = {{2, 1, false},  {2, 8, true},   {46, 3, true},
                                       {130, 1, true}, {0, 64, false}, {0, 8, true}};

template <typename T>
void check_schedules(Report& report, GemmOp op, ElementType type, const Experts& experts,
                     GroupedGemm problem, const Buffer<T>& out, const std::string& what) {
  const Buffer<T> other(out.count());
  const Buffer<std::uint32_t> tickets(std::vector<std::uint32_t>{0});
  std::uint64_t differences = 0, left_tickets = 0;
  for (const ScheduleCase& schedule : kSchedules) {
    other.poison();
    problem.out = other.get();
    problem.h = nullptr;
    run(op, type, experts, problem,
        {.num_sms = schedule.num_sms,
         .band = schedule.band,
         .tickets = schedule.tickets ? tickets.get() : nullptr});
    differences += count_differences(out.get(), other.get(), out.count());
    left_tickets += tickets.download()[0];
  }
  report.check(differences == 0 && left_tickets == 0, what + ": same bits for 6 other schedules");
}

void test_fprop(Report& report, const Layout& layout, std::int64_t n, std::int64_t k) {
  const Experts experts(layout);
  const auto num_experts = static_cast<std::int64_t>(layout.rows.size());
  const Buffer<bf16> x(layout.capacity * k), w(num_experts * n * k), out(layout.capacity * n);
  fill_rows(x, experts, k, 1, Padding::nan);
  fill_random(w, 2);
  out.poison();
  const GroupedGemm problem{.n = n, .k = k, .x = x.get(), .w = w.get(), .out = out.get()};
  run(GemmOp::fprop, ElementType::bf16, experts, problem);
  const Finding finding;
  check_rows_kernel<<<static_cast<unsigned>(layout.capacity), 256>>>(
      out.get(), x.get(), w.get(), experts.owner.get(), 0, n, k, k, 1, finding.get());
  const std::string what = describe("fprop", n, k, layout);
  finding.report(report, what);
  check_schedules(report, GemmOp::fprop, ElementType::bf16, experts, problem, out, what);
  if (n % 16 != 0) return;

  const Buffer<bf16> h(layout.capacity * n), a(layout.capacity * n / 2);
  const Buffer<float> weights(layout.capacity);
  fill_rows(weights, experts, 1, 3, Padding::nan);
  h.poison();
  a.poison();
  GroupedGemm swiglu = problem;
  swiglu.out = a.get();
  swiglu.h = h.get();
  swiglu.row_weights = weights.get();
  run(GemmOp::fprop_swiglu, ElementType::bf16, experts, swiglu);
  const std::string swiglu_what = describe("fprop_swiglu", n, k, layout);
  report.check(count_differences(h.get(), out.get(), out.count()) == 0,
               swiglu_what + ": h has the bits of fprop");
  const Finding activation;
  check_activation_kernel<<<static_cast<unsigned>(layout.capacity), 256>>>(
      a.get(), h.get(), weights.get(), experts.owner.get(), n / 2, activation.get());
  activation.report(report, swiglu_what);
  check_schedules(report, GemmOp::fprop_swiglu, ElementType::bf16, experts, swiglu, a, swiglu_what);
}

__global__ void round_kernel(bf16* out, const float* in, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    // The poison stays the poison.
    out[i] = __float_as_uint(in[i]) == 0xFFFFFFFF ? __ushort_as_bfloat16(0xFFFF)
                                                  : __float2bfloat16_rn(in[i]);
  }
}

__global__ void add_kernel(float* out, const float* in, std::int64_t count) {
  for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    out[i] = __fadd_rn(out[i], in[i]);
  }
}

void test_dgrad(Report& report, const Layout& layout, std::int64_t n, std::int64_t k) {
  const Experts experts(layout);
  const auto num_experts = static_cast<std::int64_t>(layout.rows.size());
  const Buffer<bf16> d_y(layout.capacity * n), w(num_experts * n * k), out(layout.capacity * k);
  const Buffer<bf16> rounded(layout.capacity * k);
  const Buffer<float> wide(layout.capacity * k);
  fill_rows(d_y, experts, n, 4, Padding::nan);
  fill_random(w, 5);
  out.poison();
  wide.poison();
  GroupedGemm problem{.n = n, .k = k, .d_y = d_y.get(), .w = w.get(), .out = out.get()};
  run(GemmOp::dgrad, ElementType::bf16, experts, problem);
  const Finding finding;
  check_rows_kernel<<<static_cast<unsigned>(layout.capacity), 256>>>(
      out.get(), d_y.get(), w.get(), experts.owner.get(), 0, k, n, 1, k, finding.get());
  const std::string what = describe("dgrad", n, k, layout);
  finding.report(report, what);
  check_schedules(report, GemmOp::dgrad, ElementType::bf16, experts, problem, out, what);
  problem.out = wide.get();
  run(GemmOp::dgrad, ElementType::f32, experts, problem);
  round_kernel<<<1024, 256>>>(rounded.get(), wide.get(), wide.count());
  report.check(count_differences(rounded.get(), out.get(), out.count()) == 0,
               what + ": f32 rounds to the bf16 result");
  const Finding wide_finding;
  check_rows_kernel<<<static_cast<unsigned>(layout.capacity), 256>>>(
      wide.get(), d_y.get(), w.get(), experts.owner.get(), 0, k, n, 1, k, wide_finding.get());
  wide_finding.report(report, what + " f32");
}

void test_wgrad(Report& report, const Layout& layout, std::int64_t n, std::int64_t k) {
  const Experts experts(layout);
  const auto num_experts = static_cast<std::int64_t>(layout.rows.size());
  const std::int64_t count = num_experts * n * k;
  const Buffer<bf16> d_y(layout.capacity * n), x(layout.capacity * k), out(count), rounded(count);
  const Buffer<float> wide(count), main_grad(count), expected(count);
  fill_rows(d_y, experts, n, 6, Padding::zero);
  fill_rows(x, experts, k, 7, Padding::zero);
  out.poison();
  wide.poison();
  GroupedGemm problem{.n = n, .k = k, .x = x.get(), .d_y = d_y.get(), .out = out.get()};
  run(GemmOp::wgrad, ElementType::bf16, experts, problem);
  const Finding finding;
  const std::int64_t stride = std::max<std::int64_t>(1, n / 32);
  check_grad_kernel<<<dim3(static_cast<unsigned>(n / stride), static_cast<unsigned>(num_experts)),
                      256>>>(out.get(), d_y.get(), x.get(), experts.starts.get(),
                             experts.rows.get(), n, k, stride, finding.get());
  const std::string what = describe("wgrad", n, k, layout);
  finding.report(report, what);
  check_schedules(report, GemmOp::wgrad, ElementType::bf16, experts, problem, out, what);
  problem.out = wide.get();
  run(GemmOp::wgrad, ElementType::f32, experts, problem);
  round_kernel<<<1024, 256>>>(rounded.get(), wide.get(), count);
  report.check(count_differences(rounded.get(), out.get(), count) == 0,
               what + ": f32 rounds to the bf16 result");
  fill_random(main_grad, 8, 100.0F);
  fill_random(expected, 8, 100.0F);
  add_kernel<<<1024, 256>>>(expected.get(), wide.get(), count);
  problem.out = main_grad.get();
  problem.accumulate = true;
  run(GemmOp::wgrad, ElementType::f32, experts, problem);
  report.check(count_differences(expected.get(), main_grad.get(), count) == 0,
               what + ": main_grad gets exactly one rounded addition");
}

// An addition to main_grad flushes nothing: subnormal gradients and sums stay what they are.
void test_subnormal_grad(Report& report) {
  constexpr std::int64_t kN = 136, kK = 264, kCount = 2 * kN * kK;
  const Experts experts(make_layout({100, 7}));
  const Buffer<bf16> d_y(experts.layout.capacity * kN), x(experts.layout.capacity * kK);
  const Buffer<float> wide(kCount), main_grad(kCount), expected(kCount);
  fill_rows(d_y, experts, kN, 51, Padding::zero);
  fill_random(x, 52, 1e-39F);
  fill_random(main_grad, 53, 1e-39F);
  fill_random(expected, 53, 1e-39F);
  GroupedGemm problem{.n = kN, .k = kK, .x = x.get(), .d_y = d_y.get(), .out = wide.get()};
  run(GemmOp::wgrad, ElementType::f32, experts, problem);
  add_kernel<<<1024, 256>>>(expected.get(), wide.get(), kCount);
  problem.out = main_grad.get();
  problem.accumulate = true;
  run(GemmOp::wgrad, ElementType::f32, experts, problem);
  report.check(count_differences(expected.get(), main_grad.get(), kCount) == 0,
               "an addition to a subnormal main_grad flushes nothing");
}

// A row's bits depend on nothing but the row: not on how many rows its expert has (and so not on
// the width of its tile), not on its place, not on what the others hold.
void test_other_rows(Report& report) {
  constexpr std::int64_t kN = 384, kK = 776, kRows = 700;
  const Experts full(make_layout({kRows, 64, 0, 128}));
  const Buffer<bf16> x(full.layout.capacity * kK), w(4 * kN * kK), out(full.layout.capacity * kN);
  fill_rows(x, full, kK, 11, Padding::nan);
  fill_random(w, 12);
  const GroupedGemm problem{.n = kN, .k = kK, .x = x.get(), .w = w.get(), .out = out.get()};
  run(GemmOp::fprop, ElementType::bf16, full, problem);
  std::uint64_t differences = 0;
  for (const std::int64_t rows : {1, 31, 33, 64, 65, 97, 129, 161, 193, 225, 256, 300, 513}) {
    // The first `rows` rows alone, among strangers: a shorter expert, other neighbours.
    const Experts part(make_layout({rows, 77}));
    const Buffer<bf16> part_x(part.layout.capacity * kK), part_out(part.layout.capacity * kN);
    fill_rows(part_x, part, kK, 99, Padding::nan);
    UNIEP_CUDA_CHECK(cudaMemcpy(part_x.get(), x.get(), static_cast<std::size_t>(rows * kK) * 2,
                                cudaMemcpyDeviceToDevice));
    GroupedGemm alone = problem;
    alone.x = part_x.get();
    alone.out = part_out.get();
    run(GemmOp::fprop, ElementType::bf16, part, alone);
    differences += count_differences(part_out.get(), out.get(), rows * kN);
    // The same rows shifted by 37 places within their expert.
    const Experts shifted(make_layout({rows + 37}));
    const Buffer<bf16> shifted_x(shifted.layout.capacity * kK);
    const Buffer<bf16> shifted_out(shifted.layout.capacity * kN);
    fill_rows(shifted_x, shifted, kK, 98, Padding::nan);
    UNIEP_CUDA_CHECK(cudaMemcpy(shifted_x.get() + 37 * kK, x.get(),
                                static_cast<std::size_t>(rows * kK) * 2, cudaMemcpyDeviceToDevice));
    alone.x = shifted_x.get();
    alone.out = shifted_out.get();
    run(GemmOp::fprop, ElementType::bf16, shifted, alone);
    differences += count_differences(shifted_out.get() + 37 * kN, out.get(), rows * kN);
  }
  report.check(differences == 0, "a row has the same bits in 26 other surroundings");
}

void test_table(Report& report) {
  const Experts experts(make_layout({300, 0, 65}));
  constexpr std::int64_t kK = 256;
  const std::int64_t sizes[] = {136, 640, 128};
  std::vector<std::unique_ptr<Buffer<bf16>>> buffers;
  std::vector<GroupedGemm> problems;
  for (const std::int64_t n : sizes) {
    for (const std::int64_t count : {experts.layout.capacity * kK, 3 * n * kK,
                                     experts.layout.capacity * n, experts.layout.capacity * n}) {
      buffers.push_back(std::make_unique<Buffer<bf16>>(count));
      fill_random(*buffers.back(), buffers.size());
    }
    const std::size_t i = buffers.size() - 4;
    problems.push_back({.n = n,
                        .k = kK,
                        .x = buffers[i]->get(),
                        .w = buffers[i + 1]->get(),
                        .out = buffers[i + 2]->get()});
    buffers[i + 2]->poison();
    buffers[i + 3]->poison();
  }
  run_grouped_gemm(GemmOp::fprop, ElementType::bf16, ElementType::bf16, experts.view(), problems,
                   {});
  std::uint64_t differences = 0;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const Buffer<bf16>& together = *buffers[4 * i + 2];
    GroupedGemm alone = problems[i];
    alone.out = buffers[4 * i + 3]->get();
    run(GemmOp::fprop, ElementType::bf16, experts, alone);
    differences += count_differences(together.get(), buffers[4 * i + 3]->get(), together.count());
  }
  report.check(differences == 0, "three problems in one launch have the bits of three launches");
}

// Launches that follow each other share a ticket counter, also when a graph replays them.
void test_graph(Report& report) {
  const Experts experts(make_layout({700, 0, 65, 1300}));
  constexpr std::int64_t kN = 768, kK = 512;
  const std::int64_t capacity = experts.layout.capacity;
  const Buffer<bf16> x(capacity * kK), w(4 * kN * kK), y(capacity * kN), d_w(4 * kN * kK);
  const Buffer<bf16> expected_y(y.count()), expected_d_w(d_w.count());
  const Buffer<std::uint32_t> tickets(std::vector<std::uint32_t>{0});
  fill_rows(x, experts, kK, 31, Padding::zero);
  fill_random(w, 32);
  GroupedGemm fprop{.n = kN, .k = kK, .x = x.get(), .w = w.get(), .out = expected_y.get()};
  run(GemmOp::fprop, ElementType::bf16, experts, fprop);
  GroupedGemm wgrad{
      .n = kN, .k = kK, .x = x.get(), .d_y = expected_y.get(), .out = expected_d_w.get()};
  run(GemmOp::wgrad, ElementType::bf16, experts, wgrad);
  fprop.out = y.get();
  wgrad.d_y = y.get();
  wgrad.out = d_w.get();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  UNIEP_CUDA_CHECK(cudaStreamCreate(&stream));
  UNIEP_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const GemmLaunch launch{.stream = stream, .tickets = tickets.get()};
  run_grouped_gemm(GemmOp::fprop, ElementType::bf16, ElementType::bf16, experts.view(), {&fprop, 1},
                   launch);
  run_grouped_gemm(GemmOp::wgrad, ElementType::bf16, ElementType::bf16, experts.view(), {&wgrad, 1},
                   launch);
  UNIEP_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  UNIEP_CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));
  std::uint64_t differences = 0;
  for (int i = 0; i < 20; ++i) {
    UNIEP_CUDA_CHECK(cudaMemsetAsync(y.get(), 0, static_cast<std::size_t>(y.count()) * 2, stream));
    UNIEP_CUDA_CHECK(
        cudaMemsetAsync(d_w.get(), 0xFF, static_cast<std::size_t>(d_w.count()) * 2, stream));
    UNIEP_CUDA_CHECK(cudaGraphLaunch(replay, stream));
    UNIEP_CUDA_CHECK(cudaStreamSynchronize(stream));
    differences += count_differences(d_w.get(), expected_d_w.get(), d_w.count());
  }
  report.check(differences == 0 && tickets.download()[0] == 0,
               "20 replays of a graph that shares one ticket counter have the same bits");
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

// Products of a row index and a width past 2^31, in every operand and output.
void test_large(Report& report) {
  const Layout layout = make_layout({37, 299'900, 101});
  const Experts experts(layout);
  constexpr std::int64_t kWide = 7168, kNarrow = 64;
  const std::int64_t last = layout.starts[2];
  const auto rows = static_cast<unsigned>(layout.capacity - last);
  const Buffer<bf16> wide(layout.capacity * kWide), narrow(layout.capacity * kNarrow);
  const Buffer<bf16> w(3 * kWide * kNarrow), out(layout.capacity * kWide);
  fill_random(w, 21);
  fill_rows(wide, experts, kWide, 22, Padding::zero);
  fill_rows(narrow, experts, kNarrow, 23, Padding::zero);
  const Finding fprop, dgrad, wgrad;
  out.poison();
  GroupedGemm p{.n = kNarrow, .k = kWide, .x = wide.get(), .w = w.get(), .out = out.get()};
  run(GemmOp::fprop, ElementType::bf16, experts, p);
  check_rows_kernel<<<rows, 256>>>(out.get(), wide.get(), w.get(), experts.owner.get(), last,
                                   kNarrow, kWide, kWide, 1, fprop.get());
  fprop.report(report, "fprop past 2^31 elements of x");
  out.poison();
  p = {.n = kNarrow, .k = kWide, .d_y = narrow.get(), .w = w.get(), .out = out.get()};
  run(GemmOp::dgrad, ElementType::bf16, experts, p);
  check_rows_kernel<<<rows, 256>>>(out.get(), narrow.get(), w.get(), experts.owner.get(), last,
                                   kWide, kNarrow, 1, kWide, dgrad.get());
  dgrad.report(report, "dgrad past 2^31 elements of its output");
  p = {.n = kNarrow, .k = kWide, .x = wide.get(), .d_y = narrow.get(), .out = out.get()};
  run(GemmOp::wgrad, ElementType::bf16, experts, p);
  check_grad_kernel<<<dim3(8, 1), 256>>>(out.get() + 2 * kNarrow * kWide, narrow.get(), wide.get(),
                                         experts.starts.get() + 2, experts.rows.get() + 2, kNarrow,
                                         kWide, 8, wgrad.get());
  wgrad.report(report, "wgrad past 2^31 elements of x");
}

// The same for weights and their gradients: 2.2e9 elements, of which the last expert's are checked.
void test_large_weights(Report& report) {
  constexpr std::int64_t kN = 7168, kK = 2048, kExperts = 150;
  std::vector<std::int64_t> rows(kExperts, 1);
  rows[0] = 0;
  rows[kExperts - 1] = 70;
  const Experts experts(make_layout(rows));
  const std::int64_t last = experts.layout.starts[kExperts - 1];
  const auto checked = static_cast<unsigned>(experts.layout.capacity - last);
  const Buffer<bf16> x(experts.layout.capacity * kK), y(experts.layout.capacity * kN);
  const Buffer<bf16> w(kExperts * kN * kK);
  const Finding fprop, wgrad;
  fill_rows(x, experts, kK, 41, Padding::zero);
  fill_random(w, 42);
  y.poison();
  GroupedGemm p{.n = kN, .k = kK, .x = x.get(), .w = w.get(), .out = y.get()};
  run(GemmOp::fprop, ElementType::bf16, experts, p);
  check_rows_kernel<<<checked, 256>>>(y.get(), x.get(), w.get(), experts.owner.get(), last, kN, kK,
                                      kK, 1, fprop.get());
  fprop.report(report, "fprop past 2^31 elements of w");
  w.poison();
  p = {.n = kN, .k = kK, .x = x.get(), .d_y = y.get(), .out = w.get()};
  run(GemmOp::wgrad, ElementType::bf16, experts, p);
  check_grad_kernel<<<dim3(kN / 512, 1), 256>>>(
      w.get() + (kExperts - 1) * kN * kK, y.get(), x.get(), experts.starts.get() + kExperts - 1,
      experts.rows.get() + kExperts - 1, kN, kK, 512, wgrad.get());
  wgrad.report(report, "wgrad past 2^31 elements of its output");
}

void test_refusals(Report& report) {
  const Buffer<bf16> memory(1 << 16);
  for (const Refusal& refusal : try_refusals(memory.get())) {
    report.check(refusal.refused, "refuses " + refusal.what + ": " + refusal.text);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  Report report;
  const Layout ragged = make_layout({0, 1, 127, 128, 129, 0, 300, 31, 257});
  const std::int64_t shapes[][2] = {{128, 128},   {256, 512},   {72, 776},
                                    {776, 72},    {1416, 2056}, {768, 2048},
                                    {2880, 1408}, {1408, 768},  {2056, 1416}};
  for (const auto& shape : shapes) {
    if (quick && shape[0] + shape[1] > 1000) continue;
    test_fprop(report, ragged, shape[0], shape[1]);
    test_dgrad(report, ragged, shape[0], shape[1]);
    test_wgrad(report, ragged, shape[0], shape[1]);
  }
  test_other_rows(report);
  test_subnormal_grad(report);
  test_table(report);
  test_graph(report);
  test_refusals(report);
  if (!quick) {
    const Layout tall = make_layout({5000, 3, 0, 2048, 1777});
    test_fprop(report, tall, 768, 2048);
    test_dgrad(report, tall, 2816, 1408);
    test_wgrad(report, tall, 768, 2048);
    std::vector<std::int64_t> many(384);
    for (std::size_t i = 0; i < many.size(); ++i)
      many[i] = static_cast<std::int64_t>(i * 7919 % 67);
    test_fprop(report, make_layout(many), 128, 256);
    test_wgrad(report, make_layout(many), 128, 256);
    test_fprop(report, make_layout({0, 0, 0}), 128, 64);
    test_wgrad(report, make_layout({0, 0, 0}), 128, 64);
    test_large(report);
    test_large_weights(report);
  }
  return report.finish();
}
