// SPDX-License-Identifier: Apache-2.0
// uniep verify --backend cuda.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "base/error.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"
#include "verify.hpp"

namespace uniep::tools {
namespace {

// The CPU's loops take some tens of seconds for more choices * hidden * ffn.
constexpr double kMostWorkOfCpu = 1e9;
// Tokens that the CPU recomputes of a case that is too large for it.
constexpr std::int64_t kSample = 64;

// In the f64 comparison a result with few elements may be small by chance: its relative error is
// then no measure.
constexpr std::int64_t kMinRowsForF64 = 64;

// The case, f32, with gates so large that exp(-g) vanishes beside 1: silu is then g on every
// machine, whatever its exp, and what is left are products and sums, whose bits are a contract.
Case saturate_gates(Case data) {
  const auto values = [](std::vector<std::byte>& bytes) {
    return std::span(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
  };
  constexpr float kLeastX = 0.25F;
  constexpr float kLeastGate = 20;  // exp(-20) is less than half of the last place of 1
  for (float& x : values(data.x)) x = std::abs(x) + kLeastX;
  const auto hidden = static_cast<std::size_t>(data.hidden);
  const auto gate = static_cast<std::size_t>(data.ffn) * hidden;
  const float least = kLeastGate / kLeastX / static_cast<float>(data.hidden);
  const std::span<float> w1 = values(data.w1);
  for (std::size_t i = 0; i < w1.size(); ++i) {
    if (i % (2 * gate) < gate) w1[i] = std::abs(w1[i]) + least;
  }
  return data;
}

// Whatever its exp, the GPU's f32 has the CPU's bits where exp does not matter. With the CPU's exp,
// in emulation, all f32 has.
std::string compare_with_cpu_bits(const Case& data, const CudaOptions& options,
                                  std::array<std::uint64_t, 5>& hashes) {
  const Case compared = cuda_facts().is_emulated ? data : saturate_gates(data);
  const CaseResult expected = run_case_sequential(compared, true);
  hashes = hash_results(expected);
  return describe_difference(compared, expected, run_case_on_gpu(compared, options));
}

// Schedule `index` of a rank count: the given or default one first, then points of the space.
CudaSchedule schedule_at(const VerifyFlags& flags, int ranks_of_launch, std::int64_t index,
                         bool can_fuse) {
  const CudaSchedule first = resolve(parse_cuda_schedule(flags.layer.schedule), ranks_of_launch);
  if (index == 0 || !flags.layer.schedule.empty()) return first;
  return sample_cuda_schedule(flags.options.seed, static_cast<std::uint64_t>(index), first.blocks,
                              can_fuse);
}

void verify_f64_if_meaningful(const Case& data, const CaseResult& got, Verdict& verdict) {
  if (count_rows(data) >= kMinRowsForF64) return verify_f64(data, got, verdict);
  verdict.report.print("f64 error     not compared: fewer than {} rows\n", kMinRowsForF64);
}

double work_of(const Case& data) {
  return static_cast<double>(data.topk_ids.size()) * static_cast<double>(data.hidden) *
         static_cast<double>(data.ffn);
}

// `count` of the case's tokens, the first and the last among them.
std::vector<std::int64_t> spread_tokens(const Case& data, std::int64_t count) {
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.push_back(i * (data.num_tokens - 1) / std::max<std::int64_t>(1, count - 1));
  }
  return tokens;
}

// Rows `tokens` of `all`, of `width` elements each.
template <typename T>
std::vector<T> take_rows(const std::vector<T>& all, const std::vector<std::int64_t>& tokens,
                         std::int64_t width) {
  std::vector<T> rows;
  rows.reserve(tokens.size() * static_cast<std::size_t>(width));
  for (const std::int64_t token : tokens) {
    const auto first = all.begin() + token * width;
    rows.insert(rows.end(), first, first + width);
  }
  return rows;
}

std::int64_t row_bytes_of(const Case& data) { return data.hidden * dtype_bytes(data.dtype); }

// The case with these of its tokens only.
Case take_tokens(const Case& data, const std::vector<std::int64_t>& tokens) {
  Case part{.dtype = data.dtype,
            .num_tokens = static_cast<std::int64_t>(tokens.size()),
            .hidden = data.hidden,
            .ffn = data.ffn,
            .num_experts = data.num_experts,
            .topk = data.topk,
            .tokens_per_rank = {},
            .x = take_rows(data.x, tokens, row_bytes_of(data)),
            .topk_ids = take_rows(data.topk_ids, tokens, data.topk),
            .topk_weights = take_rows(data.topk_weights, tokens, data.topk),
            .w1 = data.w1,
            .w2 = data.w2,
            .d_out = take_rows(*data.d_out, tokens, row_bytes_of(data))};
  return part;
}

// Zeros in d_out for all other tokens, so that they add nothing to weight gradients.
void keep_d_out(Case& data, const std::vector<std::int64_t>& tokens) {
  const std::int64_t width = row_bytes_of(data);
  std::vector<std::byte> kept(data.d_out->size());
  for (const std::int64_t token : tokens) {
    std::copy_n(data.d_out->begin() + token * width, width, kept.begin() + token * width);
  }
  data.d_out = std::move(kept);
}

// A case that is too large for the CPU, by a sample of its tokens. A token's results depend on no
// other token: run without the others it must have the same bits. The sample is small enough for
// f64, and so are weight gradients to which only the sample adds. Returns the case of the sample;
// `data` loses the rest of its d_out.
Case verify_sample(Case& data, const CaseResult& alone, const CudaOptions& options,
                   std::int64_t count, Verdict& verdict) {
  const std::vector<std::int64_t> tokens = spread_tokens(data, count);
  Case part = take_tokens(data, tokens);
  const auto take = [&](const CaseResult& all, CaseResult weight_gradients) {
    weight_gradients.out = take_rows(all.out, tokens, row_bytes_of(data));
    weight_gradients.d_x = take_rows(all.d_x, tokens, row_bytes_of(data));
    weight_gradients.d_topk_weights = take_rows(all.d_topk_weights, tokens, data.topk);
    return weight_gradients;
  };
  const CaseResult by_itself = run_case_on_gpu(part, options);
  const std::string difference = describe_difference(part, by_itself, take(alone, by_itself));
  ++verdict.runs;
  const std::string name = fmt::format("{} tokens", count);
  print_row(verdict.report, name, hash_results(by_itself), difference.empty() ? 1 : 0, 1);
  if (!difference.empty()) fail(verdict, name + " without the others: " + difference);
  verdict.records.push_back({{"sample", count}, {"equal", difference.empty()}});
  keep_d_out(data, tokens);
  const CaseResult sparse = run_case_on_gpu(data, options);
  ++verdict.runs;
  verify_f64_if_meaningful(part, take(sparse, sparse), verdict);
  return part;
}

}  // namespace

void verify_dtype_on_gpu(const VerifyFlags& flags, const std::string& dtype, Verdict& verdict) {
  Report& report = verdict.report;
  CaseOptions case_options = flags.options;
  case_options.dtype = dtype;
  const std::vector<int> ranks = parse_ranks(flags.ranks);
  const int widest = *std::max_element(ranks.begin(), ranks.end());
  Case data = build_case(case_options, widest, true);
  CudaOptions options = cuda_options(flags.layer);
  options.backward = true;
  options.schedule = schedule_at(flags, 1, 0, false);
  const CudaOptions alone_options = options;
  const CaseResult alone = run_case_on_gpu(data, options);
  const auto expected = hash_results(alone);
  print_header(report, dtype);
  print_row(report, "gpu alone", expected, 1, 1);
  for (const int num_ranks : ranks) {
    std::int64_t equal = 0;
    auto hashes = expected;
    for (std::int64_t i = 0; i < flags.schedules; ++i) {
      show_progress(
          fmt::format("{} ranks {} schedule {}/{} ", dtype, num_ranks, i + 1, flags.schedules));
      options.num_ranks = num_ranks;
      const int together = ranks_of_launch(options);
      options.schedule = schedule_at(flags, together, i, can_fuse(data.dtype, together));
      options.repeats = static_cast<int>(1 + i % 2);
      const CaseResult result = run_case_on_gpu(data, options);
      ++verdict.runs;
      const std::string difference = describe_difference(data, alone, result);
      if (difference.empty()) {
        ++equal;
      } else {
        hashes = hash_results(result);
        fail(verdict, fmt::format("{} ranks, schedule {}: {}", num_ranks,
                                  to_string(options.schedule), difference));
      }
    }
    show_progress("");
    print_row(report, fmt::format("{} ranks", num_ranks), hashes, equal, flags.schedules);
    add_ranks_record(verdict, dtype, num_ranks, flags.schedules, equal, hashes);
  }
  std::int64_t sample = flags.sample;
  if (sample < 0) sample = work_of(data) > kMostWorkOfCpu ? kSample : 0;
  sample = std::min(sample, data.num_tokens);
  if (sample > 0) {
    data = verify_sample(data, alone, alone_options, sample, verdict);
  } else {
    verify_f64_if_meaningful(data, alone, verdict);
  }
  if (dtype != "f32") return;
  std::array<std::uint64_t, 5> hashes{};
  const std::string difference = compare_with_cpu_bits(data, options, hashes);
  ++verdict.runs;
  if (!difference.empty()) fail(verdict, "f32 products against the CPU's bits: " + difference);
  print_row(report, "cpu products", hashes, difference.empty() ? 1 : 0, 1);
  verdict.records.push_back({{"dtype", dtype}, {"cpu_bits", difference.empty()}});
}

namespace {

// What fuzzing draws from: on a GPU also sizes that fill it; emulated, what ends soon.
struct FuzzSpace {
  std::array<std::int64_t, 6> hidden, ffn, tokens, experts;
  double most_work;           // choices * hidden * ffn
  std::int64_t most_weights;  // experts * hidden * ffn, which the host fills
};
constexpr FuzzSpace kGpuSpace{.hidden = {8, 72, 136, 256, 1024, 2880},
                              .ffn = {8, 72, 136, 192, 320, 768},
                              .tokens = {0, 1, 7, 129, 1000, 2049},
                              .experts = {1, 3, 8, 10, 33, 64},
                              .most_work = 4e9,
                              .most_weights = 30'000'000};
constexpr FuzzSpace kEmulatedSpace{.hidden = {8, 8, 16, 24, 40, 72},
                                   .ffn = {8, 8, 16, 24, 40, 72},
                                   .tokens = {0, 1, 7, 20, 31, 45},
                                   .experts = {1, 2, 3, 6, 10, 20},
                                   .most_work = 3e5,
                                   .most_weights = 1'000'000};
// More takes the CPU some seconds, and a fuzzer wants many cases.
constexpr double kMostFuzzWorkOfCpu = 1e8;

std::string beyond_bound(const Case& data, const CaseResult& got) {
  const auto errors = compare_with_f64(data, got, run_case_f64(data, true));
  for (std::size_t i = 0; i < errors.size(); ++i) {
    if (!(errors[i].relative <= errors[i].bound)) {
      return fmt::format("{} is {:.2e} from f64, more than {:.2e}", kResultNames[i],
                         errors[i].relative, errors[i].bound);
    }
  }
  return {};
}

}  // namespace

std::string fuzz_one_on_gpu(std::uint64_t seed, const LayerOptions& layer,
                            std::string& description) {
  const FuzzSpace& space = cuda_facts().is_emulated ? kEmulatedSpace : kGpuSpace;
  Rng rng(seed);
  constexpr std::array<std::int64_t, 5> kTopks{1, 2, 3, 6, 8};
  constexpr std::array<int, 6> kRanks{1, 2, 3, 4, 5, 8};
  constexpr std::array<const char*, 11> kRoutings{
      "W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "zipf:1.2", "one-hot", "empty-ranks"};
  CaseOptions o;
  o.shape = "tiny";
  o.hidden = pick(rng, space.hidden);
  o.ffn = pick(rng, space.ffn);
  o.tokens = pick(rng, space.tokens);
  o.experts = pick(rng, space.experts);
  o.experts = std::clamp(space.most_weights / (o.hidden * o.ffn), std::int64_t{1}, o.experts);
  o.topk = pick(rng, kTopks);
  const double per_token = static_cast<double>(o.topk * o.hidden * o.ffn);
  o.tokens = std::min(o.tokens, static_cast<std::int64_t>(space.most_work / per_token));
  o.mask = rng.below(3) == 0 ? 0.3 : 0.0;
  if (rng.below(20) == 0) o.mask = 1.0;
  o.dtype = rng.below(2) == 0 ? "bf16" : "f32";
  o.seed = seed;
  o.routing = pick(rng, kRoutings);
  CudaOptions options = cuda_options(layer);
  options.backward = true;
  options.num_ranks = pick(rng, kRanks);
  options.repeats = static_cast<int>(1 + rng.below(2));
  const CudaSchedule alone_schedule = resolve({}, 1);
  const DType dtype = o.dtype == "bf16" ? DType::bf16 : DType::f32;
  options.schedule =
      sample_cuda_schedule(seed, rng.below(1U << 20), resolve({}, ranks_of_launch(options)).blocks,
                           can_fuse(dtype, ranks_of_launch(options)));
  description = fmt::format(
      "T={} H={} F={} E={} k={} ranks={} routing={} mask={} dtype={} repeats={} schedule {}",
      o.tokens, o.hidden, o.ffn, o.experts, o.topk, options.num_ranks, o.routing, o.mask, o.dtype,
      options.repeats, to_string(options.schedule));
  Case data;
  try {
    data = build_case(o, options.num_ranks, true);
  } catch (const Error&) {
    // Some routings need two ranks or two owners; the balanced one always fits.
    o.routing = "W0";
    data = build_case(o, options.num_ranks, true);
  }
  CudaOptions alone_options = options;
  alone_options.num_ranks = 1;
  alone_options.schedule = alone_schedule;
  const CaseResult alone = run_case_on_gpu(data, alone_options);
  std::string difference = describe_difference(data, alone, run_case_on_gpu(data, options));
  if (!difference.empty()) return difference;
  if (work_of(data) > kMostFuzzWorkOfCpu) return {};
  if (o.dtype == "f32") {
    std::array<std::uint64_t, 5> hashes{};
    difference = compare_with_cpu_bits(data, options, hashes);
    if (!difference.empty()) return "f32 products against the CPU's bits: " + difference;
  }
  return count_rows(data) < kMinRowsForF64 ? std::string() : beyond_bound(data, alone);
}

}  // namespace uniep::tools
