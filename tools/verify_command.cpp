// SPDX-License-Identifier: Apache-2.0
// uniep verify: sequential execution against every rank count and many schedules, bit by bit, and
// against f64 within a bound. With --fuzz, random shapes, routings and schedules, replayable by
// seed.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "commands.hpp"
#include "cpu/group.hpp"
#include "layer/compare.hpp"
#include "layer/run_case.hpp"
#include "verify.hpp"

namespace uniep::tools {

void fail(Verdict& verdict, const std::string& text) {
  ++verdict.failures;
  verdict.report.print("FAIL  {}\n", text);
}

void print_header(Report& report, const std::string& dtype) {
  report.print("{:<12}", dtype);
  for (const char* name : kResultNames) report.print("  {:<16}", name);
  report.print("  equal\n");
}

void print_row(Report& report, const std::string& name, const std::array<std::uint64_t, 5>& hashes,
               std::int64_t equal, std::int64_t runs) {
  report.print("{:<12}", name);
  for (const std::uint64_t hash : hashes) report.print("  {:016x}", hash);
  report.print("  {}/{}\n", equal, runs);
}

void add_ranks_record(Verdict& verdict, const std::string& dtype, int num_ranks,
                      std::int64_t schedules, std::int64_t equal,
                      const std::array<std::uint64_t, 5>& hashes) {
  nlohmann::json record{
      {"dtype", dtype}, {"ranks", num_ranks}, {"schedules", schedules}, {"equal", equal}};
  for (std::size_t r = 0; r < hashes.size(); ++r) {
    record["hashes"][kResultNames[r]] = fmt::format("{:016x}", hashes[r]);
  }
  verdict.records.push_back(record);
}

void show_progress(const std::string& text) {
  if (::isatty(STDERR_FILENO) != 0) fmt::print(stderr, "\r{:<40}\r{}", "", text);
}

void verify_f64(const Case& data, const CaseResult& got, Verdict& verdict) {
  Report& report = verdict.report;
  const auto bounds = compare_with_f64(data, got, run_case_f64(data, true));
  report.print("{:<12}", "f64 error");
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    report.print("  {:>7.1e}<{:>7.1e} ", bounds[i].relative, bounds[i].bound);
    verdict.records.push_back({{"result", kResultNames[i]},
                               {"f64_error", bounds[i].relative},
                               {"bound", bounds[i].bound}});
  }
  report.print("\n");
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    if (!(bounds[i].relative <= bounds[i].bound)) {
      fail(verdict, fmt::format("{} is {:.2e} from f64, more than {:.2e}", kResultNames[i],
                                bounds[i].relative, bounds[i].bound));
    }
  }
}

namespace {

// The schedules of one rank count: the given or default one first, then points of the space.
Schedule schedule_at(const VerifyFlags& flags, std::int64_t index) {
  if (index == 0 || !flags.layer.schedule.empty()) return parse_schedule(flags.layer.schedule);
  return sample_schedule(flags.options.seed, static_cast<std::uint64_t>(index));
}

void verify_dtype(const VerifyFlags& flags, const std::string& dtype, Verdict& verdict) {
  Report& report = verdict.report;
  CaseOptions case_options = flags.options;
  case_options.dtype = dtype;
  const std::vector<int> ranks = parse_ranks(flags.ranks);
  const int widest = *std::max_element(ranks.begin(), ranks.end());
  const Case data = build_case(case_options, widest, true);
  const CaseResult sequential = run_case_sequential(data, true);
  print_header(report, dtype);
  const auto expected = hash_results(sequential);
  print_row(report, "sequential", expected, 1, 1);
  for (const int num_ranks : ranks) {
    std::int64_t equal = 0;
    auto hashes = expected;
    for (std::int64_t i = 0; i < flags.schedules; ++i) {
      show_progress(
          fmt::format("{} ranks {} schedule {}/{} ", dtype, num_ranks, i + 1, flags.schedules));
      RunOptions options = run_options(flags.layer);
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
    show_progress("");
    print_row(report, fmt::format("{} ranks", num_ranks), hashes, equal, flags.schedules);
    add_ranks_record(verdict, dtype, num_ranks, flags.schedules, equal, hashes);
  }
  verify_f64(data, sequential, verdict);
}

// One random case from a seed; returns what failed, or nothing.
std::string fuzz_one(std::uint64_t seed, const LayerOptions& layer, std::string& description) {
  Rng rng(seed);
  constexpr std::array<std::int64_t, 7> kWidths{8, 16, 64, 72, 136, 200, 264};
  constexpr std::array<std::int64_t, 9> kTokens{0, 1, 2, 7, 31, 33, 45, 64, 129};
  constexpr std::array<std::int64_t, 8> kExperts{1, 2, 3, 6, 8, 10, 20, 33};
  constexpr std::array<std::int64_t, 7> kTopks{1, 2, 3, 6, 7, 8, 10};
  constexpr std::array<int, 7> kRanks{1, 2, 3, 4, 5, 8, 16};
  constexpr std::array<const char*, 11> kRoutings{
      "W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "zipf:1.2", "one-hot", "empty-ranks"};
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
  options.wait_bound = std::chrono::seconds(layer.timeout);
  options.processes = layer.processes;
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

void run_fuzz(const VerifyFlags& flags, Verdict& verdict) {
  verdict.report.print("seed {} (replay one case: --fuzz --seconds 0 --seed SEED)\n",
                       flags.options.seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(flags.seconds);
  std::uint64_t seed = flags.options.seed;
  do {
    std::string description;
    const std::string failure = flags.layer.is_cuda()
                                    ? fuzz_one_on_gpu(seed, flags.layer, description)
                                    : fuzz_one(seed, flags.layer, description);
    ++verdict.runs;
    if (!failure.empty()) {
      fail(verdict, fmt::format("seed {}: {}: {}", seed, description, failure));
      verdict.records.push_back({{"seed", seed}, {"case", description}, {"difference", failure}});
    }
    ++seed;
  } while (std::chrono::steady_clock::now() < end && verdict.failures < 10);
  verdict.report.print("{} cases, seeds {} to {}\n", verdict.runs, flags.options.seed, seed - 1);
}

int run_verify(const VerifyFlags& flags) {
  check_layer_options(flags.layer);
  const bool is_cuda = flags.layer.is_cuda();
  if (!is_cuda && flags.sample >= 0) {
    throw_invalid("--sample is for the cuda backend; on the cpu all tokens are recomputed");
  }
  for (const int num_ranks : parse_ranks(flags.ranks)) {
    for (std::int64_t i = 0; i < flags.schedules && !flags.fuzz && !is_cuda; ++i) {
      cpu::check_num_threads(num_ranks, schedule_at(flags, i));
    }
  }
  if (flags.dtype != "both" && flags.dtype != "f32" && flags.dtype != "bf16") {
    throw_invalid("--dtype is {}; it can be both, f32 or bf16", quote(flags.dtype));
  }
  Verdict verdict{.report = Report(flags.json)};
  if (flags.fuzz) {
    run_fuzz(flags, verdict);
  } else {
    const auto verify = is_cuda ? verify_dtype_on_gpu : verify_dtype;
    if (flags.dtype != "bf16") verify(flags, "f32", verdict);
    if (flags.dtype != "f32") verify(flags, "bf16", verdict);
  }
  verdict.report.print("{}: {} runs, {} failures\n", verdict.failures == 0 ? "PASS" : "FAIL",
                       verdict.runs, verdict.failures);
  verdict.report.write({{"schema", 1},
                        {"backend", flags.layer.backend},
                        {"seed", flags.options.seed},
                        {"runs", verdict.runs},
                        {"failures", verdict.failures},
                        {"records", verdict.records}});
  verdict.report.publish();
  return verdict.failures == 0 ? 0 : 1;
}

// --fuzz chooses everything from the seed: a flag that it would not heed is refused, and so is
// --seconds without it.
void check_fuzz_flags(const CLI::App& command, bool fuzz) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0) continue;
    const std::string name = option->get_name();
    const bool both = name == "--seed" || name == "--json" || name == "--timeout" ||
                      name == "--processes" || name == "--backend" || name == "--numerics";
    const bool fuzz_only = name == "--fuzz" || name == "--seconds";
    if (!both && fuzz_only != fuzz) {
      throw_invalid("{} has no meaning {} --fuzz; leave one of them out or add the other", name,
                    fuzz ? "with" : "without");
    }
  }
}

}  // namespace

void add_verify(CLI::App& app, Run& run) {
  auto flags = std::make_shared<VerifyFlags>();
  auto* command = app.add_subcommand("verify", "prove that ranks and schedules give the same bits");
  add_case_options(*command, flags->options);
  command->add_option("--dtype", flags->dtype, "both, f32 or bf16")
      ->type_name("NAME")
      ->capture_default_str();
  command->add_option("--ranks", flags->ranks, "rank counts, 1 to 1024, comma separated")
      ->type_name("N,…")
      ->capture_default_str();
  add_number(*command, "--schedules", flags->schedules, 1, 100000, "schedules for each rank count");
  add_number(*command, "--sample", flags->sample, 0, kMaxTokensFlag,
             "on cuda: of how many tokens the CPU recomputes the results; 0 takes all",
             "all, or 64 where that would take long");
  add_layer_options(*command, flags->layer);
  command->get_option("--schedule")
      ->description("only this schedule; uniep run --help has the keys");
  command->add_flag("--fuzz", flags->fuzz, "random shapes, routings, ranks and schedules");
  add_real(*command, "--seconds", flags->seconds, 0, 1e6, "seconds to fuzz; 0 tries one case");
  add_json_option(*command, flags->json, "the table");
  command->callback([&run, flags, command] {
    check_fuzz_flags(*command, flags->fuzz);
    run = [flags] { return run_verify(*flags); };
  });
}

}  // namespace uniep::tools
