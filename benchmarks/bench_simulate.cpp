// SPDX-License-Identifier: Apache-2.0
// The simulator against what was measured (benchmarks/results), and how many schedules it scores in
// a second. With --fit the figures named below are fitted to the rows marked F and printed; the
// other rows were not seen by the fit.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "simulate/hardware.hpp"
#include "simulate/load.hpp"
#include "simulate/score.hpp"

namespace uniep::simulate {
namespace {

struct Row {
  std::string group, name;
  bool is_fitted = false;
  double measured_us = 0;
  std::function<double(const Hardware&)> predict;
};

// Rows of experts as benchmarks/grouped_gemm_cuda.py draws them (its random numbers are torch's, so
// multinomial counts are others of the same distribution, and zipf's are in another order).
std::vector<std::int64_t> draw_rows(const std::string& routing, std::int64_t rows, int experts) {
  const auto size = static_cast<std::size_t>(experts);
  std::vector<std::int64_t> counts(size, rows / experts);
  if (routing == "multinomial") {
    std::fill(counts.begin(), counts.end(), 0);
    Rng rng(1);
    for (std::int64_t i = 0; i < rows; ++i) ++counts[rng.below(size)];
  } else if (routing == "zipf") {
    const std::int64_t floor = std::min<std::int64_t>(1024, rows / experts / 2);
    double total = 0;
    for (int i = 1; i <= experts; ++i) total += 1.0 / i;
    std::int64_t left = rows - floor * experts;
    const auto all = static_cast<double>(left);
    for (int i = 0; i < experts; ++i) {
      const auto extra = static_cast<std::int64_t>(all / (i + 1) / total);
      counts[static_cast<std::size_t>(i)] = floor + extra;
      left -= extra;
    }
    counts[0] += left;
  }
  return counts;
}

void add_products(const std::string& path, std::vector<Row>& rows) {
  std::ifstream file(path);
  const auto all = nlohmann::json::parse(file);
  for (const auto& r : all["records"]) {
    if (r["impl"] != "uniep") continue;
    const std::string pass = r["pass"], gemm = r["gemm"], shape = r["shape"];
    const std::string routing = r["routing"];
    const std::int64_t n = r["n"], k = r["k"], count = r["tokens"];
    const int experts = r["experts"];
    const Groups groups = groups_of(draw_rows(routing, count, experts));
    Output output = Output::rows;
    std::int64_t columns = n, inner = k;
    if (pass == "dgrad") std::swap(columns, inner);
    if (pass == "swiglu+h") output = Output::swiglu;
    if (pass == "wgrad") output = Output::wgrad;
    if (pass == "main_grad") output = Output::main_grad;
    // Fitted: even rows of two shapes; shown: other shapes, other routings, few rows.
    const bool fit = routing == "even" && (shape == "qwen3-30b-a3b" || shape == "deepseek-v3");
    const bool fit_narrow = routing == "multinomial" && shape == "qwen3-30b-a3b" && count > 10000;
    rows.push_back({"product " + pass, fmt::format("{} {} {} rows {}", shape, gemm, count, routing),
                    fit || fit_narrow || (pass == "swiglu+h" && routing == "even"),
                    r["ms_median"].get<double>() * 1e3, [=](const Hardware& hw) {
                      const GemmWork work = gemm_work(hw, groups, output, columns, inner);
                      return gemm_time(hw, work, hw.sms).total() + hw.launch_us;
                    }});
  }
}

LayerSizes qwen(int ranks) {
  return {.tokens = 8192 / ranks,
          .hidden = 2048,
          .ffn = 768,
          .experts = 128,
          .topk = 8,
          .ranks = ranks,
          .dtype = DType::bf16};
}

Load virtual_ranks(const LayerSizes& sizes) {
  return uniform_load(sizes,
                      {.ranks = sizes.ranks, .ranks_per_gpu = sizes.ranks, .gpus_per_node = 8});
}

// benchmarks/results/split_h200_2aa017a.md and split_h200_6e22165.md; forward changed nothing
// between them, backward its activation gradient, which the older one had in two bytes a lane.
void add_layers(std::vector<Row>& rows) {
  struct Measured {
    int ranks;
    const char* schedule;
    double forward, forward_before, backward;
  };
  const std::vector<Measured> all{{1, "", 1.960, 1.934, 3.439},
                                  {2, "payload=rank", 1.698, 1.657, 3.278},
                                  {2, "payload=rank,combine=pull", 1.558, 1.507, 3.142},
                                  {2, "payload=choice", 1.804, 1.753, 3.430},
                                  {2, "payload=choice,combine=pull", 1.665, 1.598, 3.276},
                                  {4, "payload=rank", 1.575, 1.562, 3.251},
                                  {4, "payload=rank,combine=pull", 1.483, 1.449, 3.138},
                                  {4, "payload=choice", 1.681, 1.665, 3.286},
                                  {4, "payload=choice,combine=pull", 1.543, 1.532, 3.115}};
  for (const Measured& m : all) {
    const Load load = virtual_ranks(qwen(m.ranks));
    const CudaSchedule s =
        parse_cuda_schedule(std::string("blocks=16") + (*m.schedule != 0 ? "," : "") + m.schedule);
    const std::string name = fmt::format("R = {} {}", m.ranks, m.schedule);
    const bool fit = m.ranks != 4;
    const auto forward = [=](const Hardware& hw) { return Scorer(hw, load).forward(s).total(); };
    rows.push_back({"layer forward", name, fit, m.forward * 1e3, forward});
    rows.push_back({"layer forward, 6e22165", name, false, m.forward_before * 1e3, forward});
    rows.push_back({"layer backward", name, fit, m.backward * 1e3,
                    [=](const Hardware& hw) { return Scorer(hw, load).backward(s).total(); }});
  }
}

void add_plans(std::vector<Row>& rows) {
  struct Measured {
    int ranks, blocks;
    double in_graph, launched;
  };
  for (const Measured& m : std::vector<Measured>{{2, 8, 45.26, 52.29},
                                                 {2, 16, 29.35, 36.06},
                                                 {2, 32, 22.00, 29.09},
                                                 {8, 8, 50.24, 57.12},
                                                 {8, 16, 32.09, 39.04},
                                                 {8, 32, 33.39, 40.35}}) {
    LayerSizes sizes = qwen(m.ranks);
    sizes.tokens = 8192;
    sizes.experts = 256;
    const Load load = virtual_ranks(sizes);
    CudaSchedule s;
    s.blocks = m.blocks;
    rows.push_back({"plan in a graph", fmt::format("R = {}, {} blocks", m.ranks, m.blocks),
                    m.ranks == 2, m.in_graph, [=](const Hardware& hw) {
                      std::vector<StageTime> stages;
                      static_cast<void>(Scorer(hw, load).forward(s, &stages));
                      return stages[0].parts.total() - hw.grid_launch_us - hw.signal_us;
                    }});
  }
}

// Nsight Compute, one kernel at a time at its own clock: shown only.
void add_kernels(std::vector<Row>& rows) {
  const Load load = virtual_ranks(qwen(2));
  const auto add = [&](const char* name, double us, auto predict) {
    rows.push_back({"kernel alone", name, false, us, predict});
  };
  const auto product = [&](Gemm gemm) {
    return [=](const Hardware& hw) { return Scorer(hw, load).product(gemm).total(); };
  };
  add("gemm1", 336, product(Gemm::gemm1));
  add("gemm2", 184, product(Gemm::gemm2));
  add("dgrad2", 184, product(Gemm::dgrad2));
  add("dgrad1", 313, product(Gemm::dgrad1));
  add("wgrad2", 248, product(Gemm::wgrad2));
  add("wgrad1", 463, product(Gemm::wgrad1));
  const auto stage = [&](const char* name, bool is_backward) {
    return [=, wanted = std::string(name)](const Hardware& hw) {
      std::vector<StageTime> stages;
      const CudaSchedule s = parse_cuda_schedule("blocks=16");
      const Scorer scorer(hw, load);
      static_cast<void>(is_backward ? scorer.backward(s, &stages) : scorer.forward(s, &stages));
      for (const StageTime& t : stages) {
        if (wanted == t.name) return t.parts.total() - hw.grid_launch_us;
      }
      return 0.0;
    };
  };
  add("dispatch", 202, stage("dispatch", false));
  add("combine", 395, stage("combine", false));
  add("combine, backward", 430, stage("combine", true));
}

double error_of(const Row& row, const Hardware& hw) {
  return row.predict(hw) / row.measured_us - 1;
}

double loss(const std::vector<Row>& rows, const std::string& prefix, const Hardware& hw) {
  double sum = 0;
  int count = 0;
  for (const Row& row : rows) {
    if (!row.is_fitted || !row.group.starts_with(prefix)) continue;
    sum += std::pow(error_of(row, hw), 2);
    ++count;
  }
  return sum / count;
}

// Each figure in turn up or down by a factor that shrinks when nothing helps.
void fit(const std::vector<Row>& rows, const std::string& prefix,
         const std::vector<const char*>& names, Hardware& hw) {
  double best = loss(rows, prefix, hw);
  for (double step = 0.2; step > 1e-4; step /= 1.5) {
    for (bool improved = true; improved;) {
      improved = false;
      for (const char* name : names) {
        for (const double factor : {1 + step, 1 / (1 + step)}) {
          double& value = figure(hw, name);
          const double before = value;
          const bool is_share = std::strstr(name, "share") != nullptr;
          value = std::min(value * factor, is_share ? 1.0 : 1e9);
          const double now = loss(rows, prefix, hw);
          if (now < best * (1 - 1e-9)) {
            best = now;
            improved = true;
          } else {
            value = before;
          }
        }
      }
    }
  }
  fmt::print("fitted to '{}': mean square of relative errors {:.3g}\n", prefix, best);
  for (const char* name : names) fmt::print("  {:<22} {:.6g}\n", name, figure(hw, name));
}

void print_rows(const std::vector<Row>& rows, const Hardware& hw) {
  std::string group;
  for (const Row& row : rows) {
    if (row.group != group) fmt::print("\n{}\n", group = row.group);
    fmt::print("  {} {:<48} {:>10.1f} {:>10.1f} us {:>+6.1f} %\n", row.is_fitted ? 'F' : ' ',
               row.name, row.measured_us, row.predict(hw), 100 * error_of(row, hw));
  }
  fmt::print("\n{:<28} {:>5} {:>9} {:>9}   {:>5} {:>9} {:>9}\n", "", "fitted", "mean", "worst",
             "shown", "mean", "worst");
  std::vector<std::string> groups;
  for (const Row& row : rows) {
    if (std::find(groups.begin(), groups.end(), row.group) == groups.end()) {
      groups.push_back(row.group);
    }
  }
  for (const std::string& name : groups) {
    double sum[2] = {}, worst[2] = {};
    int count[2] = {};
    for (const Row& row : rows) {
      if (row.group != name) continue;
      const double error = std::abs(error_of(row, hw));
      sum[row.is_fitted] += error;
      worst[row.is_fitted] = std::max(worst[row.is_fitted], error);
      ++count[row.is_fitted];
    }
    fmt::print("{:<28}", name);
    for (const int i : {1, 0}) {
      if (count[i] == 0) {
        fmt::print(" {:>5} {:>9} {:>9}  ", 0, "", "");
      } else {
        fmt::print(" {:>5} {:>7.1f} % {:>7.1f} %  ", count[i], 100 * sum[i] / count[i],
                   100 * worst[i]);
      }
    }
    fmt::print("\n");
  }
}

// Of this thread's processor, so that other work on the machine does not count.
double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void print_speed(const Hardware& hw) {
  const Load load = uniform_load(qwen(2), {.ranks = 2, .ranks_per_gpu = 1, .gpus_per_node = 8});
  const Scorer scorer(hw, load);
  const auto all = legal_cuda_schedules(load.sizes, scorer.limits(), {});
  const double start = thread_seconds();
  double sum = 0;
  std::size_t count = 0;
  double seconds = 0;
  while (seconds < 1) {
    for (const CudaSchedule& s : all) sum += scorer.layer(s).total();
    count += all.size();
    seconds = thread_seconds() - start;
  }
  fmt::print(
      "\n{} legal points; {:.2f} million schedules a second, forward and backward, on one "
      "core (mean {:.0f} us)\n",
      all.size(), static_cast<double>(count) / seconds / 1e6, sum / static_cast<double>(count));
}

int run(int argc, char** argv) {
  const std::string hardware = argc > 1 ? argv[1] : "hw/h200.json";
  const std::string results = argc > 2 ? argv[2] : "benchmarks/results";
  const bool with_fit = argc > 3 && std::string_view(argv[3]) == "--fit";
  Hardware hw = load_hardware(hardware);
  std::vector<Row> rows;
  add_products(results + "/grouped_gemm_h200_542318f.json", rows);
  add_plans(rows);
  add_layers(rows);
  add_kernels(rows);
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.group < b.group; });
  if (with_fit) {
    fit(rows, "product",
        {"mma_step_us", "narrow_share", "epilogue_rows_us", "epilogue_swiglu_us",
         "epilogue_wgrad_us", "epilogue_main_us", "tail_share"},
        hw);
    fit(rows, "plan", {"plan_base_us", "plan_pair_us"}, hw);
    fit(rows, "layer", {"warp_read_rate", "warp_store_rate", "warp_reduce_rate", "epilogue_f32_us"},
        hw);
  }
  print_rows(rows, hw);
  print_speed(hw);
  return 0;
}

}  // namespace
}  // namespace uniep::simulate

int main(int argc, char** argv) {
  try {
    return uniep::simulate::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_simulate: {}\n", error.what());
    return 2;
  }
}
