// SPDX-License-Identifier: Apache-2.0
// uniep tune: scores every legal schedule, measures the best few, keeps and explains the winner.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "cpu/gemm.hpp"
#include "io/case.hpp"
#include "layer/run_case.hpp"
#include "schedule/space.hpp"
#include "simulate.hpp"
#include "simulate/cpu_score.hpp"
#include "timeline/ceilings.hpp"
#include "tune.hpp"
#include "uniep/version.hpp"
#include "uniep_commit.hpp"

namespace uniep::tools {
namespace {

using tune::Candidate;
using tune::Tuned;

struct Flags {
  CaseOptions options;
  LayerOptions layer;
  HardwareOptions where;
  std::string cache, json;
  std::int64_t tokens_per_rank = -1, ranks = 2, measure = 6, repeats = 5, seconds = 30;
  bool explain = false;
};

double cores() { return std::max(1U, std::thread::hardware_concurrency()); }

LayerSizes sizes_of(const Case& data, int num_ranks) {
  const auto tokens = tokens_of_ranks(data, num_ranks);
  return {.tokens = *std::max_element(tokens.begin(), tokens.end()),
          .hidden = data.hidden,
          .ffn = data.ffn,
          .experts = data.num_experts,
          .topk = static_cast<int>(data.topk),
          .ranks = num_ranks,
          .dtype = data.dtype};
}

void warn(const std::string& text) { fmt::print(stderr, "uniep: warning: {}\n", text); }

// Figures of this CPU: measured once, then of a file beside the tuned schedules.
simulate::CpuMachine measure_cpu(DType dtype, std::int64_t hidden, const std::string& folder) {
  constexpr int kVersion = 1;
  const std::string key =
      fmt::format("{}; {}; {} cores; {}", machine_info()["cpu"].get<std::string>(),
                  cpu::to_string(cpu::best_instruction_set()), cores(), dtype_name(dtype));
  std::optional<tune::StateFile> file;
  if (!folder.empty()) file.emplace(folder + "/cpu.json", "uniep_cpu", kVersion, warn);
  simulate::CpuMachine machine;
  machine.cores = cores();
  if (file) {
    const nlohmann::json entries = file->read();
    const auto found = entries.find(key);
    if (found != entries.end()) {
      const auto rate = [&](const char* name) {
        const bool ok = found->is_object() && found->contains(name) && (*found)[name].is_number();
        const double value = ok ? (*found)[name].get<double>() : 0;
        return value >= 1 && value <= 1e12 ? value : 0;
      };
      machine.flops_rate = rate("flops_rate");
      machine.copy_rate = rate("copy_rate");
      if (machine.flops_rate > 0 && machine.copy_rate > 0) return machine;
      file->warn("'" + file->path() + "' holds no rates for this CPU; they are measured again");
    }
  }
  const Ceilings measured = measure_ceilings(Schedule{}, dtype, hidden, 1);
  machine.flops_rate = std::max(1.0, measured.flops_per_s / 1e6);
  machine.copy_rate = std::max(1.0, measured.link_bytes_per_s / 1e6);
  if (file) {
    file->update([&](nlohmann::json& entries) {
      entries[key] = {{"flops_rate", machine.flops_rate}, {"copy_rate", machine.copy_rate}};
    });
  }
  return machine;
}

// Schedules of one family move rows in the same way and are fused or not.
std::string family_of(const CudaSchedule& s) {
  const std::string text = to_string(s);
  return text.substr(0, text.find(",blocks"));
}
std::string family_of(const Schedule& s) {
  const std::string text = to_string(s);
  return fmt::format("{},tile_m={},workers={}", text.substr(0, text.find(",tile_m")), s.tile_m,
                     s.workers);
}

// Of forward and backward, without set-up: from the records of the run's last round.
double measure_on_cpu(const Case& data, RunOptions options) {
  Trace trace;
  options.trace = &trace;
  options.trace_capacity = 4;  // whole operations are the last records of a worker
  options.backward = true;
  options.repeats = 2;
  static_cast<void>(run_case(data, options));
  double us = 0;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::int64_t first = 0, last = 0;
    bool any = false;
    for (const TraceEvent& e : trace.events) {
      if (e.kind != TraceKind::operation || e.pass != pass) continue;
      first = any ? std::min(first, e.start_ns) : e.start_ns;
      last = any ? std::max(last, e.end_ns) : e.end_ns;
      any = true;
    }
    us += static_cast<double>(last - first) / 1e3;
  }
  return us;
}

struct Space {
  std::vector<Candidate> scored;
  Candidate fallback;
  tune::Measure measure;
  std::string not_measured;  // why, or empty
  std::string device;
  double seconds = 0;  // of scoring
  Case data;
};

template <typename S, typename Score>
void score_all(Space& space, const std::vector<S>& all, const S& fallback, Score score) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<simulate::Parts> parts;
  parts.reserve(all.size());
  for (const S& s : all) parts.push_back(score(s));
  space.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::size_t i = 0; i < all.size(); ++i) {
    space.scored.push_back({to_string(all[i]), family_of(all[i]), parts[i], 0});
  }
  space.fallback = {to_string(fallback), family_of(fallback), score(fallback), 0};
}

void make_cpu_space(const Flags& f, Space& space) {
  const auto ranks = static_cast<int>(f.ranks);
  space.data = build_case(f.options, ranks, true);
  const LayerSizes sizes = sizes_of(space.data, ranks);
  const auto cache = open_cache(f.cache);
  const std::string folder =
      cache ? std::filesystem::path(cache->path()).parent_path().string() : "";
  const auto machine = measure_cpu(space.data.dtype, space.data.hidden, folder);
  std::vector<std::int64_t> rows(static_cast<std::size_t>(space.data.num_experts), 0);
  for (const std::int32_t id : space.data.topk_ids) {
    if (id >= 0) ++rows[static_cast<std::size_t>(id)];
  }
  const simulate::CpuScorer scorer(machine, sizes, rows, true);
  // Workers up to the cores that are there; more only take them from each other.
  const auto most = std::clamp(static_cast<std::int32_t>(cores()) / ranks, 1, 64);
  std::vector<Schedule> all;
  for (std::int32_t workers = 1; workers <= most; workers *= 2) {
    Schedule base;
    base.workers = workers;
    const auto some = legal_schedules(sizes, base);
    all.insert(all.end(), some.begin(), some.end());
  }
  score_all(space, all, Schedule{}, [&](const Schedule& s) { return scorer.layer(s); });
  space.device = machine_info()["cpu"].get<std::string>();
  RunOptions options;
  options.num_ranks = ranks;
  options.wait_bound = std::chrono::seconds(f.layer.timeout);
  options.processes = f.layer.processes;
  space.measure = [&data = space.data, options](const std::string& s) -> std::optional<double> {
    RunOptions mine = options;
    mine.schedule = parse_schedule(s);
    return measure_on_cpu(data, mine);
  };
}

void make_gpu_space(const Flags& f, Space& space) {
  const auto ranks = static_cast<int>(f.ranks);
  const CudaFacts facts = cuda_facts();
  HardwareOptions where = f.where;
  if (facts.missing.empty()) where.ranks_per_gpu = ranks;  // all ranks share the GPU here
  simulate::Hardware hardware = find_hardware(where.profile);
  if (facts.missing.empty())
    hardware.sms = facts.sms;  // what is legal is up to the GPU that is here
  Step step = build_step(f.options, ranks, where, hardware);
  space.data.dtype = step.sizes.dtype;
  space.data.hidden = step.sizes.hidden;
  space.data.ffn = step.sizes.ffn;
  space.data.num_experts = step.sizes.experts;
  space.data.topk = step.sizes.topk;
  space.data.tokens_per_rank = step.tokens_per_rank;
  space.data.topk_ids = std::move(step.topk_ids);
  space.data.topk_weights.assign(space.data.topk_ids.size(), 1.0F);
  for (const std::int64_t tokens : step.tokens_per_rank) space.data.num_tokens += tokens;
  const simulate::Load load =
      simulate::load_of(step.sizes, step.topology, step.tokens_per_rank, space.data.topk_ids);
  const simulate::Scorer scorer(hardware, load);
  if (const auto reason = why_illegal(CudaSchedule{}, load.sizes, scorer.limits())) {
    throw_invalid("{}", *reason);
  }
  std::vector<CudaSchedule> all = legal_cuda_schedules(load.sizes, scorer.limits(), {});
  if (facts.missing.empty() && !can_fuse(space.data.dtype, ranks)) {
    std::erase_if(all, [](const CudaSchedule& s) { return s.fusion == Fusion::fused; });
  }
  score_all(space, all, CudaSchedule{}, [&](const CudaSchedule& s) { return scorer.layer(s); });
  space.device = facts.missing.empty() ? facts.gpu : hardware.name + " (profile)";
  space.not_measured = facts.missing;
  if (!facts.missing.empty()) return;
  CudaOptions options;
  options.num_ranks = ranks;
  options.backward = true;
  options.wait_bound = std::chrono::seconds(f.layer.timeout);
  options.repeats = 3;
  space.measure = [&data = space.data, options,
                   seed = f.options.seed](const std::string& s) -> std::optional<double> {
    CudaOptions mine = options;
    mine.schedule = parse_cuda_schedule(s);
    std::vector<double> ms;
    try {
      ms = time_layer(data, mine, seed)["layer"];
    } catch (const Error& error) {
      // Memory that a schedule needs may not be there; a world that failed shows at the next one.
      if (error.code() == ErrorCode::invalid_argument) return std::nullopt;
      throw;
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e3;
  };
}

std::string times_of(const Candidate& c) {
  return c.measured_us > 0 ? fmt::format("predicted {:.0f} us, measured {:.0f} us",
                                         c.predicted.total(), c.measured_us)
                           : fmt::format("predicted {:.0f} us", c.predicted.total());
}

// Which part of its prediction makes `c` slower than the choice.
std::string why_lost(const Candidate& c, const Candidate& choice) {
  const char* worst = nullptr;
  double most = 0.01 * choice.predicted.total();
  for (const auto& [name, part] : simulate::kParts) {
    const double more = c.predicted.*part - choice.predicted.*part;
    if (more > most) {
      most = more;
      worst = name;
    }
  }
  if (worst != nullptr) return fmt::format("{} takes {:.0f} us longer", worst, most);
  if (c.measured_us > 0) {
    return fmt::format("predicted {:+.1f} % of the choice's time, measured {:+.1f} %",
                       100 * (c.predicted.total() / choice.predicted.total() - 1),
                       100 * (c.measured_us / choice.measured_us - 1));
  }
  return "predicted the same within a hundredth";
}

void explain(Report& report, const Space& space, const Tuned& tuned) {
  const auto& parts = tuned.choice.predicted;
  report.print("limit now   {} (predicted:", limit_of(parts));
  for (const auto& [name, part] : simulate::kParts) {
    report.print(" {} {:.0f} %", name, 100 * parts.*part / parts.total());
  }
  report.print(")\n");
  if (tuned.runner_up) {
    report.print("runner-up   {}\n            {}; {}\n", tuned.runner_up->schedule,
                 times_of(*tuned.runner_up), why_lost(*tuned.runner_up, tuned.choice));
  }
  if (!space.not_measured.empty()) {
    report.print("not measured, and so not stored: {}\n", space.not_measured);
  }
  for (const Candidate& c : tuned.measured) report.print("  {:<70} {}\n", c.schedule, times_of(c));
}

nlohmann::json candidate_json(const Candidate& c) {
  nlohmann::json json{{"schedule", c.schedule}, {"predicted", to_json(c.predicted)}};
  if (c.measured_us > 0) json["measured_us"] = c.measured_us;
  return json;
}

int run_tune(Flags f) {
  if (!f.layer.schedule.empty()) {
    throw_invalid("--schedule is given to uniep tune, which looks for one; leave it out");
  }
  if (f.layer.backend != "cpu" && f.layer.backend != "cuda") {
    throw_invalid("--backend is {}; it can be cpu or cuda", quote(f.layer.backend));
  }
  if (f.layer.backend == "cuda" && f.layer.processes) {
    throw_invalid(
        "--processes cannot be given with --backend cuda to uniep tune, which times ranks on one "
        "GPU; leave it out");
  }
  if (f.layer.numerics != "default") {
    throw_invalid("--numerics is {}; the only numeric class served is default",
                  quote(f.layer.numerics));
  }
  if (f.tokens_per_rank >= 0 && f.options.tokens >= 0) {
    throw_invalid("--tokens-per-rank and --global-tokens say the same thing; give one of them");
  }
  if (f.tokens_per_rank >= 0) f.options.tokens = f.tokens_per_rank * f.ranks;
  Report report(f.json);
  Space space;
  if (f.layer.is_cuda()) {
    make_gpu_space(f, space);
  } else {
    make_cpu_space(f, space);
  }
  const Tuned tuned = tune::choose(space.scored, space.fallback, space.measure,
                                   {.candidates = static_cast<int>(f.measure),
                                    .repeats = static_cast<int>(f.repeats),
                                    .seconds = static_cast<double>(f.seconds)});
  bool is_stored = false;
  auto cache = open_cache(f.cache);
  if (!tuned.measured.empty()) {
    const auto key = key_of(f.layer.backend, space.data, static_cast<int>(f.ranks));
    is_stored = cache && tune::store_choice(*cache, key,
                                            {.schedule = tuned.choice.schedule,
                                             .predicted_us = tuned.choice.predicted.total(),
                                             .measured_us = tuned.choice.measured_us,
                                             .default_us = tuned.fallback.measured_us});
  }
  report.print("{}: {} legal schedules scored in {:.1f} ms, {} measured in {} rounds\n",
               space.device, tuned.num_scored, space.seconds * 1e3, tuned.measured.size(),
               tuned.rounds);
  report.print("choice      {}\n            {}\n", tuned.choice.schedule, times_of(tuned.choice));
  report.print("default     {}\n            {}\n", tuned.fallback.schedule,
               times_of(tuned.fallback));
  if (f.explain) explain(report, space, tuned);
  if (is_stored) report.print("stored in {}; --schedule auto uses it\n", cache->path());
  nlohmann::json json{{"schema", 1},
                      {"backend", f.layer.backend},
                      {"device", space.device},
                      {"scored", tuned.num_scored},
                      {"scoring_ms", space.seconds * 1e3},
                      {"rounds", tuned.rounds},
                      {"choice", candidate_json(tuned.choice)},
                      {"default", candidate_json(tuned.fallback)},
                      {"stored", is_stored ? nlohmann::json(cache->path()) : nlohmann::json()}};
  json["measured"] = nlohmann::json::array();
  for (const Candidate& c : tuned.measured) json["measured"].push_back(candidate_json(c));
  if (tuned.runner_up) {
    json["runner_up"] = candidate_json(*tuned.runner_up);
    json["runner_up"]["why"] = why_lost(*tuned.runner_up, tuned.choice);
  }
  if (!space.not_measured.empty()) json["not_measured"] = space.not_measured;
  report.write(json);
  report.publish();
  return 0;
}

}  // namespace

std::optional<tune::StateFile> open_cache(const std::string& path) {
  std::string file = path;
  if (file.empty()) {
    const std::string folder = tune::state_folder();
    if (folder.empty()) return std::nullopt;
    file = folder + "/tuned.json";
  }
  return tune::StateFile(file, tune::kCacheKind, tune::kCacheVersion, warn);
}

tune::Key key_of(const std::string& backend, const Case& data, int num_ranks) {
  const LayerSizes sizes = sizes_of(data, num_ranks);
  const auto tokens = tokens_of_ranks(data, num_ranks);
  const simulate::Load load = simulate::load_of(sizes, {.ranks = num_ranks}, tokens, data.topk_ids);
  const bool is_cuda = backend == "cuda";
  const CudaFacts facts = is_cuda ? cuda_facts() : CudaFacts{};
  return {.backend = backend,
          .device = is_cuda ? facts.gpu
                            : fmt::format("{}, {} cores", machine_info()["cpu"].get<std::string>(),
                                          cores()),
          .driver = is_cuda ? facts.driver : cpu::to_string(cpu::best_instruction_set()),
          .shape = fmt::format("{} x {}, {} experts, topk {}, {}", data.hidden, data.ffn,
                               data.num_experts, data.topk, dtype_name(data.dtype)),
          .skew = simulate::skew_class(load.skew),
          .code = fmt::format("{} {} {}", UNIEP_VERSION, UNIEP_COMMIT,
                              is_cuda ? kCudaScheduleVersion : kScheduleVersion),
          .ranks = num_ranks,
          .tokens = sizes.tokens};
}

std::string resolve_auto(LayerOptions& o, const Case& data, int num_ranks) {
  if (o.schedule != "auto") return "given";
  o.schedule.clear();
  auto cache = open_cache();
  if (!cache) return "default";
  try {
    const LayerSizes sizes = sizes_of(data, num_ranks);
    const auto is_legal = [&](const std::string& text) {
      try {
        if (!o.is_cuda()) return !why_illegal(parse_schedule(text), sizes).has_value();
        const CudaSchedule s = parse_cuda_schedule(text);
        const GpuLimits limits{.sms = cuda_facts().sms, .ranks_per_gpu = num_ranks};
        return !why_illegal(s, sizes, limits).has_value() &&
               (s.fusion == Fusion::split || can_fuse(data.dtype, num_ranks));
      } catch (const Error&) {
        return false;
      }
    };
    const auto found = tune::find_choice(*cache, key_of(o.backend, data, num_ranks), is_legal);
    if (!found) return "default";
    o.schedule = found->schedule;
    return "tuned";
  } catch (const Error&) {
    return "default";  // what is wrong with the case, the run itself says
  }
}

void add_tune(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("tune", "find the quickest schedule of a shape and keep it");
  add_case_options(*command, flags->options);
  command->add_option("--dtype", flags->options.dtype, "bf16 or f32")
      ->type_name("NAME")
      ->capture_default_str();
  add_number(*command, "--tokens-per-rank", flags->tokens_per_rank, 0, kMaxTokensFlag,
             "tokens of each rank", "the shape's");
  add_number(*command, "--ranks", flags->ranks, 1, kMaxRanks, "ranks");
  add_number(*command, "--measure", flags->measure, 1, 1000,
             "schedules to measure, besides the default");
  add_number(*command, "--repeats", flags->repeats, 1, 1000, "timed rounds, interleaved");
  add_number(*command, "--seconds", flags->seconds, 1, 86400,
             "after so many seconds no further round is begun");
  command->add_flag("--explain", flags->explain,
                    "what limits the choice, and why the runner-up lost");
  command
      ->add_option("--cache", flags->cache,
                   "file of tuned schedules; --schedule auto reads tuned.json in $UNIEP_CACHE, "
                   "$XDG_CACHE_HOME/uniep or ~/.cache/uniep, which is also the default here")
      ->type_name("FILE");
  add_hardware_options(*command, flags->where);
  add_layer_options(*command, flags->layer);
  add_json_option(*command, flags->json, "the choice");
  command->callback([&run, flags] { run = [flags] { return run_tune(*flags); }; });
}

}  // namespace uniep::tools
