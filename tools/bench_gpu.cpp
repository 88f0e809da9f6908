// SPDX-License-Identifier: Apache-2.0
// uniep bench --backend cuda: the layer and its parts, by the GPU's own events.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "base/error.hpp"
#include "bench.hpp"
#include "topo/placement.hpp"
#include "tune.hpp"

namespace uniep::tools {
namespace {

constexpr std::array<std::string_view, 7> kOps{"layer",    "forward", "backward",    "plan",
                                               "dispatch", "combine", "grouped_gemm"};

// In the order of time.
constexpr std::array kStages{"plan",
                             "dispatch",
                             "products",
                             "combine",
                             "fused dispatch",
                             "fused combine",
                             "backward dispatch",
                             "backward products",
                             "backward combine",
                             "backward fused dispatch",
                             "backward activation",
                             "backward fused combine",
                             "backward wgrad"};

bool is_product(std::string_view stage) {
  return stage.ends_with("products") || stage.ends_with("wgrad");
}

const char* impl_of(const CudaSchedule& schedule) {
  return schedule.fusion == Fusion::fused ? "fused" : "split";
}

struct NamedProduct {
  const char* name;
  Product product;
  double flops;  // of a row, in units of hidden * ffn
};
constexpr std::array<NamedProduct, 6> kProducts{{{"gemm1", Product::gemm1, 4},
                                                 {"gemm2", Product::gemm2, 2},
                                                 {"dgrad2", Product::dgrad2, 2},
                                                 {"dgrad1", Product::dgrad1, 4},
                                                 {"wgrad2", Product::wgrad2, 2},
                                                 {"wgrad1", Product::wgrad1, 4}}};

// Sizes and routing of the case that the flags name. Its tensors are made on the GPU: the host
// would take minutes for the weights of a large model.
Case build_sizes(const BenchFlags& f) {
  const Shape shape = resolve_shape(f.options);
  CaseOptions narrow = f.options;
  narrow.hidden = narrow.ffn = 8;  // routing does not depend on them
  Case data = build_case(narrow, static_cast<int>(f.ranks), false);
  data.hidden = shape.hidden;
  data.ffn = shape.ffn;
  for (auto* tensor : {&data.x, &data.w1, &data.w2}) tensor->clear();
  return data;
}

// Rows of the experts of the rank that has most.
std::vector<std::int64_t> rows_of_busiest_rank(const Case& data, int num_ranks) {
  const auto experts = static_cast<int>(data.num_experts);
  const Placement placement = make_contiguous_placement(experts, num_ranks);
  std::vector<std::vector<std::int64_t>> rows(static_cast<std::size_t>(num_ranks));
  std::vector<std::int64_t> of_expert(static_cast<std::size_t>(experts));
  std::vector<std::int64_t> sums(static_cast<std::size_t>(num_ranks));
  for (const std::int32_t id : data.topk_ids) {
    if (id >= 0) ++of_expert[static_cast<std::size_t>(id)];
  }
  for (std::size_t e = 0; e < of_expert.size(); ++e) {
    const auto rank = static_cast<std::size_t>(placement.rank_of[e]);
    rows[rank].push_back(of_expert[e]);
    sums[rank] += of_expert[e];
  }
  return rows[static_cast<std::size_t>(std::max_element(sums.begin(), sums.end()) - sums.begin())];
}

class GpuBench {
 public:
  explicit GpuBench(const BenchFlags& flags)
      : flags_(flags), facts_(cuda_facts()), report_(flags.json), data_(build_sizes(flags)) {
    LayerOptions layer = flags.layer;
    schedule_from_ = resolve_auto(layer, data_, static_cast<int>(flags.ranks));
    options_ = cuda_options(layer);
    options_.num_ranks = static_cast<int>(flags.ranks);
    options_.schedule = resolve(options_.schedule, options_.num_ranks);
    options_.repeats = static_cast<int>(flags.repeats);
  }

  int run() {
    if (flags_.op == "grouped_gemm") {
      run_products();
    } else {
      run_layer();
    }
    report_.write({{"schema", 1}, {"records", records_}});
    report_.publish();
    return 0;
  }

 private:
  // What a record's rates are measured against, in the unit of its rate.
  struct Ceiling {
    double rate = 0;  // 0: none
    std::string what;
  };

  [[nodiscard]] std::string where() const {
    return facts_.is_emulated
               ? "emulated on this CPU: no times of a GPU"
               : fmt::format("{}, which all ranks share; set-up is not included", facts_.gpu);
  }

  void print_header() {
    report_.print("{:<14} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9}   ({})\n", "op", "median ms",
                  "min", "max", "TFLOP/s", "GB/s", "ceiling", where());
  }

  [[nodiscard]] double flops(double of_row, std::int64_t rows) const {
    return of_row * static_cast<double>(rows) * static_cast<double>(data_.hidden) *
           static_cast<double>(data_.ffn);
  }

  void add(const std::string& name, const Spread& ms, const CudaSchedule& schedule, double flop,
           double bytes, const Ceiling& ceiling,
           const nlohmann::json& more = nlohmann::json::object()) {
    const double tflops = flop / ms.median / 1e9;
    const double gbps = bytes / ms.median / 1e6;
    const auto text = [](double rate) { return rate > 0 ? fmt::format("{:.1f}", rate) : "-"; };
    if (records_.empty()) print_header();
    report_.print("{:<14} {:>10.4f} {:>10.4f} {:>10.4f} {:>9} {:>9} {:>9}   {}\n", name, ms.median,
                  ms.min, ms.max, text(tflops), text(gbps), text(ceiling.rate),
                  ceiling.rate > 0 ? ceiling.what : "");
    nlohmann::json record = make_record(flags_, data_, to_string(schedule), impl_of(schedule), ms);
    record["schedule_from"] = schedule_from_;
    if (flop > 0) record["tflops"] = tflops;
    if (bytes > 0) record["gbps"] = gbps;
    if (ceiling.rate > 0) {
      record["ceiling"] = ceiling.rate;
      record["ceiling_is"] = ceiling.what;
    }
    record["gpus"] = 1;  // all ranks share it
    record["driver"] = facts_.driver;
    record["machine"]["gpu"] = gpu_info(facts_);
    record.update(more);
    records_.push_back(std::move(record));
  }

  // The bytes of all ranks, copied within the GPU: rows that cross virtual ranks do no more.
  [[nodiscard]] Ceiling copy_ceiling(double bytes) const {
    if (bytes <= 0) return {};
    const auto all = static_cast<std::int64_t>(bytes) * flags_.ranks;
    const Spread ms = spread_of(time_copy(all, options_.repeats));
    return {.rate = bytes / ms.median / 1e6, .what = "GB/s of a rank if rows were just copied"};
  }

  void run_products() {
    if (flags_.options.dtype != "bf16") {
      throw_invalid("--dtype is {}; the grouped product on tensor cores takes bf16",
                    quote(flags_.options.dtype));
    }
    const auto rows = rows_of_busiest_rank(data_, options_.num_ranks);
    std::int64_t sum = 0;
    for (const std::int64_t count : rows) sum += count;
    const Ceiling ceiling{.rate = facts_.peak_tflops,
                          .what = "TFLOP/s of all tensor cores at the highest clock"};
    for (const NamedProduct& p : kProducts) {
      const auto ms = spread_of(time_product(
          {.product = p.product, .expert_rows = rows, .hidden = data_.hidden, .ffn = data_.ffn},
          options_.repeats, options_.schedule.sms, flags_.options.seed));
      add(p.name, ms, options_.schedule, flops(p.flops, sum), 0, ceiling,
          {{"product", p.name}, {"rows", sum}});
    }
  }

  // The products of a fused layer have no time of their own: the split one's stand for them, if it
  // is timed beside it.
  void run_layer() {
    const bool is_fused = options_.schedule.fusion == Fusion::fused;
    if (is_fused && (flags_.op == "dispatch" || flags_.op == "combine")) {
      throw_invalid(
          "--op is {}, which is no step of its own with fusion=fused; fusion=split has it",
          quote(flags_.op));
    }
    options_.backward = flags_.op == "backward" || flags_.op == "layer";
    double products = 0;
    if (is_fused && flags_.baseline == "split" && flags_.op != "plan") {
      CudaOptions split = options_;
      split.schedule.fusion = Fusion::split;
      products = run_schedule(split, 0);
    }
    run_schedule(options_, products);
  }

  // Milliseconds of the products, of which `known_products` are known already.
  double run_schedule(const CudaOptions& options, double known_products) {
    const bool is_backward = flags_.op == "backward";
    const bool is_layer = flags_.op == "layer";
    const Times times = time_layer(data_, options, flags_.options.seed);
    const Spread ms = spread_of(times.at(flags_.op));
    const Traffic traffic = traffic_of(data_, options.schedule.payload, options.num_ranks);
    if (flags_.op == "plan") {
      add(flags_.op, ms, options.schedule, 0, 0, {});
      return 0;
    }
    if (flags_.op == "dispatch" || flags_.op == "combine") {
      const double bytes = flags_.op == "dispatch" ? traffic.dispatched : traffic.returned;
      add(flags_.op, ms, options.schedule, 0, bytes, copy_ceiling(bytes));
      return 0;
    }
    nlohmann::json stages;
    std::string table;
    double products = known_products;
    for (const char* stage : kStages) {
      const bool is_of_backward = std::string_view(stage).starts_with("backward ");
      const auto found = times.find(stage);
      if (found == times.end() || (!is_layer && is_of_backward != is_backward)) continue;
      const double median = spread_of(found->second).median;
      stages[stage] = median;
      table += fmt::format("  {:<23} {:.4f}\n", stage, median);
      if (options.schedule.fusion == Fusion::split && is_product(stage)) products += median;
    }
    const double flop = flops(is_layer ? 18 : is_backward ? 12 : 6, count_rows(data_));
    const double bytes = (is_layer ? 2 : 1) * (traffic.dispatched + traffic.returned);
    nlohmann::json more{{"stages_ms", stages}};
    Ceiling ceiling;
    if (products > 0) {
      more["gemm_only_ms"] = products;
      ceiling = {.rate = flop / products / 1e9,
                 .what = "TFLOP/s of its products and activations alone"};
    }
    add(flags_.op, ms, options.schedule, flop, bytes, ceiling, more);
    report_.print("  {}\n{}", to_string(options.schedule), table);
    return products;
  }

  const BenchFlags& flags_;
  CudaFacts facts_;
  Report report_;
  Case data_;
  CudaOptions options_;
  std::string schedule_from_;
  nlohmann::json records_ = nlohmann::json::array();
};

}  // namespace

int bench_on_gpu(const BenchFlags& f) {
  if (std::find(kOps.begin(), kOps.end(), f.op) == kOps.end()) {
    throw_invalid("--op is {}; on cuda it can be {}", quote(f.op), fmt::join(kOps, ", "));
  }
  return GpuBench(f).run();
}

}  // namespace uniep::tools
