// SPDX-License-Identifier: Apache-2.0
// uniep verify: sequential execution against every rank count and many schedules, bit by bit, and
// against f64 within a bound. With --fuzz, random shapes, routings and schedules, replayable by seed.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "commands.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"

namespace uniep::tools {
namespace {

struct Flags {
  CaseOptions options;
  std::string ranks = "1,2,4", json, backend = "cpu", numerics = "default", schedule;
  int schedules = 8;
  bool fuzz = false;
  double seconds = 10;
  std::string dtype = "both";
};

struct Verdict {
  int runs = 0;
  int failures = 0;
  nlohmann::json records = nlohmann::json::array();
};

void fail(Verdict& verdict, const std::string& text) {
  ++verdict.failures;
  fmt::print("FAIL  {}\n", text);
}

// The schedules of one rank count: the given or default one first, then points of the space.
Schedule schedule_at(const Flags& flags, int index) {
  if (index == 0 || !flags.schedule.empty()) return parse_schedule(flags.schedule);
  return sample_schedule(flags.options.seed, static_cast<std::uint64_t>(index));
}

void print_row(const std::string& name, const std::array<std::uint64_t, 5>& hashes, int equal,
               int runs) {
  fmt::print("{:<12}", name);
  for (const std::uint64_t hash : hashes) fmt::print("  {:016x}", hash);
  fmt::print("  {}/{}\n", equal, runs);
}

void verify_f64(const Case& data, const CaseResult& sequential, Verdict& verdict) {
  const auto bounds = compare_with_f64(data, sequential, run_case_f64(data, true));
  fmt::print("{:<12}", "f64 error");
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    fmt::print("  {:>7.1e}<{:>7.1e} ", bounds[i].relative, bounds[i].bound);
    verdict.records.push_back({{"result", kResultNames[i]}, {"f64_error", bounds[i].relative},
                               {"bound", bounds[i].bound}});
  }
  fmt::print("\n");
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    if (!(bounds[i].relative <= bounds[i].bound)) {
      fail(verdict, fmt::format("{} is {:.2e} from f64, more than {:.2e}", kResultNames[i],
                                bounds[i].relative, bounds[i].bound));
    }
  }
}

void verify_dtype(const Flags& flags, const std::string& dtype, Verdict& verdict) {
  CaseOptions case_options = flags.options;
  case_options.dtype = dtype;
  const std::vector<int> ranks = parse_ranks(flags.ranks);
  const int widest = *std::max_element(ranks.begin(), ranks.end());
  const Case data = build_case(case_options, widest, true);
  const CaseResult sequential = run_case_sequential(data, true);
  fmt::print("{:<12}", dtype);
  for (const char* name : kResultNames) fmt::print("  {:<16}", name);
  fmt::print("  equal\n");
  const auto expected = hash_results(sequential);
  print_row("sequential", expected, 1, 1);
  for (const int num_ranks : ranks) {
    int equal = 0;
    auto hashes = expected;
    for (int i = 0; i < flags.schedules; ++i) {
      if (::isatty(STDERR_FILENO) != 0) {
        fmt::print(stderr, "\r{} ranks {} schedule {}/{} ", dtype, num_ranks, i + 1,
                   flags.schedules);
      }
      RunOptions options;
      options.num_ranks = num_ranks;
      options.schedule = schedule_at(flags, i);
      options.backward = true;
      const CaseResult result = run_case(data, options);
      ++verdict.runs;
      const std::string difference = describe_difference(data, sequential, result);
      if (difference.empty()) {
        ++equal;
      } else {
        hashes = hash_results(result);
        fail(verdict, fmt::format("{} ranks, schedule {}: {}", num_ranks,
                                  to_string(options.schedule), difference));
      }
    }
    if (::isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r{:40}\r", "");
    print_row(fmt::format("{} ranks", num_ranks), hashes, equal, flags.schedules);
    nlohmann::json record{{"dtype", dtype}, {"ranks", num_ranks}, {"schedules", flags.schedules},
                          {"equal", equal}};
    for (std::size_t r = 0; r < hashes.size(); ++r) {
      record["hashes"][kResultNames[r]] = fmt::format("{:016x}", hashes[r]);
    }
    verdict.records.push_back(record);
  }
  verify_f64(data, sequential, verdict);
}

template <typename T, std::size_t N>
T pick(Rng& rng, const std::array<T, N>& values) {
  return values[static_cast<std::size_t>(rng.below(N))];
}

// One random case from a seed; returns what failed, or nothing.
std::string fuzz_one(std::uint64_t seed, std::string& description) {
  Rng rng(seed);
  constexpr std::array<std::int64_t, 7> kWidths{8, 16, 64, 72, 136, 200, 264};
  constexpr std::array<std::int64_t, 9> kTokens{0, 1, 2, 7, 31, 33, 45, 64, 129};
  constexpr std::array<std::int64_t, 8> kExperts{1, 2, 3, 6, 8, 10, 20, 33};
  constexpr std::array<std::int64_t, 7> kTopks{1, 2, 3, 6, 7, 8, 10};
  constexpr std::array<int, 7> kRanks{1, 2, 3, 4, 5, 8, 16};
  constexpr std::array<const char*, 11> kRoutings{"W0", "W1", "W2", "W3", "W4", "W5",
                                                  "W6", "W7", "zipf:1.2", "one-hot",
                                                  "empty-ranks"};
  CaseOptions o;
  o.shape = "tiny";
  o.hidden = pick(rng, kWidths);
  o.ffn = pick(rng, kWidths);
  o.tokens = pick(rng, kTokens);
  o.experts = pick(rng, kExperts);
  o.topk = pick(rng, kTopks);
  o.mask = rng.below(3) == 0 ? 0.3 : 0.0;
  if (rng.below(20) == 0) o.mask = 1.0;
  o.dtype = rng.below(2) == 0 ? "bf16" : "f32";
  o.seed = seed;
  const int num_ranks = pick(rng, kRanks);
  o.routing = pick(rng, kRoutings);
  RunOptions options;
  options.num_ranks = num_ranks;
  options.backward = true;
  options.repeats = static_cast<int>(1 + rng.below(2));
  options.schedule = sample_schedule(seed, rng.below(1U << 20));
  description = fmt::format(
      "T={} H={} F={} E={} k={} ranks={} routing={} mask={} dtype={} repeats={} schedule {}",
      o.tokens, o.hidden, o.ffn, o.experts, o.topk, num_ranks, o.routing, o.mask, o.dtype,
      options.repeats, to_string(options.schedule));
  Case data;
  try {
    data = build_case(o, num_ranks, true);
  } catch (const Error&) {
    // Some routings need two ranks or two owners; the balanced one always fits.
    o.routing = "W0";
    data = build_case(o, num_ranks, true);
  }
  return describe_difference(data, run_case_sequential(data, true), run_case(data, options));
}

int run_fuzz(const Flags& flags, Verdict& verdict) {
  fmt::print("seed {} (replay one case: --fuzz --seconds 0 --seed SEED)\n", flags.options.seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(flags.seconds);
  std::uint64_t seed = flags.options.seed;
  do {
    std::string description;
    const std::string failure = fuzz_one(seed, description);
    ++verdict.runs;
    if (!failure.empty()) fail(verdict, fmt::format("seed {}: {}: {}", seed, description, failure));
    ++seed;
  } while (std::chrono::steady_clock::now() < end && verdict.failures < 10);
  fmt::print("{} cases, seeds {} to {}\n", verdict.runs, flags.options.seed, seed - 1);
  return verdict.failures;
}

int run_verify(const Flags& flags) {
  check_backend(flags.backend);
  check_numerics(flags.numerics);
  if (flags.schedules < 1 || flags.schedules > 100000) {
    throw_invalid("--schedules is {}; it must be 1 to 100000", flags.schedules);
  }
  if (!(flags.seconds >= 0 && flags.seconds <= 1e6)) {
    throw_invalid("--seconds is {}; it must be 0 to 1000000", flags.seconds);
  }
  if (flags.dtype != "both") static_cast<void>(parse_dtype(flags.dtype));
  static_cast<void>(parse_schedule(flags.schedule));
  Verdict verdict;
  if (flags.fuzz) {
    run_fuzz(flags, verdict);
  } else {
    if (flags.dtype != "bf16") verify_dtype(flags, "f32", verdict);
    if (flags.dtype != "f32") verify_dtype(flags, "bf16", verdict);
  }
  fmt::print("{}: {} runs, {} failures\n", verdict.failures == 0 ? "PASS" : "FAIL", verdict.runs,
             verdict.failures);
  write_json(flags.json, {{"schema", 1}, {"seed", flags.options.seed}, {"runs", verdict.runs},
                          {"failures", verdict.failures}, {"records", verdict.records}});
  return verdict.failures == 0 ? 0 : 1;
}

}  // namespace

void add_verify(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("verify", "prove that ranks and schedules give the same bits");
  add_case_options(*command, flags->options);
  command->add_option("--backend", flags->backend, "cpu or cuda")->capture_default_str();
  command->add_option("--dtype", flags->dtype, "both, f32 or bf16")->capture_default_str();
  command->add_option("--ranks", flags->ranks, "rank counts, comma separated")
      ->capture_default_str();
  command->add_option("--schedules", flags->schedules, "schedules for each rank count")
      ->capture_default_str();
  command->add_option("--schedule", flags->schedule, "only this schedule, key=value,…");
  command->add_option("--numerics", flags->numerics, "numeric class")->capture_default_str();
  command->add_flag("--fuzz", flags->fuzz, "random shapes, routings, ranks and schedules");
  command->add_option("--seconds", flags->seconds, "how long to fuzz")->capture_default_str();
  command->add_option("--json", flags->json, "write the table as JSON to FILE, - for stdout");
  command->callback([&run, flags] { run = [flags] { return run_verify(*flags); }; });
}

}  // namespace uniep::tools
