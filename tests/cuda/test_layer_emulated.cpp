// SPDX-License-Identifier: Apache-2.0
// The layer without a GPU, split and fused: kernels and host code as they are, with virtual ranks.
// In f32 the results are the bits of the CPU's sequential path; on emulated tensor cores all are
// those of one rank's split layer, whatever the order in which CUDA threads and copies take turns.
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "layer_checks.hpp"

namespace uniep::cuda_test {
namespace {

constexpr int kSms = 3;

// The weights of a case with an eighth of its hidden columns and eight times its ffn: rows that are
// not of whole 16 bytes.
LayerCase narrow(LayerCase c) {
  constexpr int kFactor = 8;
  c.data.hidden /= kFactor;
  c.data.ffn *= kFactor;
  c.data.x.resize(c.data.x.size() / kFactor);
  c.data.d_out->resize(c.data.d_out->size() / kFactor);
  return c;
}

std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> list;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    list.push_back(layer_case("E=10 k=3, masked", {"", 24, 40, 10, 3, 50}, dtype, "W0", 0.2));
    list.push_back(layer_case("ragged", {"", 16, 8, 4, 2, 41}, dtype, "W4", 0, 3));
    list.push_back(narrow(layer_case("narrow rows", {"", 24, 8, 4, 2, 31}, dtype)));
    list.push_back(layer_case("E=3 k=3, fewer experts than ranks", {"", 8, 72, 3, 3, 33}, dtype));
  }
  list.push_back(layer_case("k=40, more choices than lanes", {"", 16, 8, 48, 40, 9}, DType::f32));
  list.push_back(layer_case("one hot", {"", 16, 24, 6, 1, 150}, DType::f32, "one-hot"));
  list.push_back(layer_case("all masked", {"", 16, 24, 4, 2, 20}, DType::f32, "W0", 1));
  list.push_back(layer_case("no tokens", {"", 16, 24, 4, 2, 0}, DType::f32));
  list.push_back(layer_case("two steps of 64 columns", {"", 72, 136, 5, 2, 70}, DType::bf16, "W1"));
  return list;
}

std::vector<LayerCase> fused_cases() {
  constexpr DType kBf16 = DType::bf16;
  std::vector<LayerCase> list;
  list.push_back(layer_case("E=10 k=3, masked", {"", 24, 40, 10, 3, 50}, kBf16, "W0", 0.2));
  list.push_back(layer_case("ragged", {"", 16, 8, 4, 2, 41}, kBf16, "W4", 0, 3));
  list.push_back(layer_case("E=3 k=3, ranks without experts", {"", 8, 72, 3, 3, 33}, kBf16));
  list.push_back(layer_case("one hot, two n tiles", {"", 16, 24, 6, 1, 270}, kBf16, "one-hot"));
  list.push_back(layer_case("three m tiles", {"", 264, 72, 5, 2, 40}, kBf16, "W1"));
  list.push_back(layer_case("k=40", {"", 16, 8, 48, 40, 9}, kBf16));
  list.push_back(layer_case("all masked", {"", 16, 24, 4, 2, 20}, kBf16, "W0", 1));
  list.push_back(layer_case("no tokens", {"", 16, 24, 4, 2, 0}, kBf16));
  return list;
}

// A block is 384 contexts, so many ranks have few clusters each.
std::vector<SplitSchedule> small_fused_schedules(int num_ranks) {
  std::vector<SplitSchedule> list;
  for (const SplitSchedule& schedule : fused_schedules(num_ranks, true)) {
    if (schedule.num_sms <= 12) list.push_back(schedule);
  }
  return list;
}

// Fused forward and backward in random orders against the split layer of one rank in turn.
void test_fused(Report& report, const LayerCase& c, int num_orders) {
  CudaRunOptions options{.num_ranks = 1,
                         .schedule = {.blocks_per_rank = 2, .num_sms = kSms},
                         .gemm = GemmEngine::tensor_cores,
                         .backward = true};
  CaseResult alone;
  std::string wrong = layer_error_of([&] { alone = run_case_cuda(c.data, options); });
  if (wrong.empty()) wrong = beyond_bound(c.data, alone);
  int runs = 0;
  for (const int num_ranks : {1, 2, 3, 5}) {
    const std::vector<SplitSchedule> schedules = small_fused_schedules(num_ranks);
    for (int order = 0; order < num_orders && wrong.empty(); ++order) {
      emulation::order_seed = static_cast<std::uint64_t>(runs);
      options.num_ranks = num_ranks;
      options.schedule = schedules[static_cast<std::size_t>(runs) % schedules.size()];
      options.repeats = 1 + runs % 2;
      CaseResult result;
      wrong = layer_error_of([&] { result = run_case_cuda(c.data, options); });
      if (wrong.empty()) wrong = describe_difference(c.data, alone, result);
      if (!wrong.empty()) {
        wrong = "R=" + std::to_string(num_ranks) + " order=" + std::to_string(runs) + " " +
                describe(options.schedule) + ": " + wrong;
      }
      ++runs;
    }
  }
  emulation::order_seed = 0;
  report.check(wrong.empty(), "fused, " + c.name + ", " + std::to_string(runs) +
                                  " runs equal one rank's split layer " + wrong);
}

// Rank 2 plans and then does not dispatch: the others name it in every stage that needs it, and
// after recover the layer works.
void test_withheld_rank(Report& report) {
  const Case data = layer_case("", {"", 24, 40, 6, 2, 45}, DType::f32).data;
  const CaseResult expected = run_case_sequential(data, true);
  LayerWorld world(data, 3, {.blocks_per_rank = 2, .num_sms = kSms}, GemmEngine::fma,
                   std::chrono::seconds(2));
  SplitLayer all = world.layer(0, 3);
  SplitLayer some = world.layer(0, 2);
  const CaseTensors tensors(data, world.placement, true);
  std::string wrong;
  wrong += layer_error_of([&] {
    const auto step = [&] {
      const SplitLayer::Saved saved = all.forward(tensors.forward(), nullptr);
      all.backward(saved, tensors.backward(), nullptr);
      all.check(saved, nullptr);
      wrong += describe_difference(data, expected, tensors.download());
    };
    step();
    const auto inputs = tensors.forward();
    cuda::DevicePlan plan(
        world.memory,
        {.topk = world.shape.topk, .max_tokens = world.shape.max_tokens, .blocks_per_rank = 2},
        world.placement);
    std::string told;
    {
      const std::jthread planner([&] {
        const cuda::RankTopk topk{inputs[2].topk_ids, inputs[2].num_tokens};
        plan.run({&topk, 1}, nullptr, 2);
      });
      told = layer_error_of([&] {
        const auto saved = some.forward(std::span(inputs).first(2), nullptr);
        some.check(saved, nullptr);
      });
    }
    std::printf("  %s\n", told.c_str());
    if (told.find("in stage dispatch, ") == std::string::npos ||
        told.find("for rank 2") == std::string::npos) {
      wrong += " told '" + told + "'";
    }
    const std::string again = layer_error_of([&] {
      const auto saved = all.forward(inputs, nullptr);
      all.check(saved, nullptr);
    });
    if (again != told) wrong += " a poisoned group told '" + again + "'";
    world.memory.recover();
    step();
    step();
  });
  report.check(wrong.empty(), "a rank that does not dispatch " + wrong);
}

}  // namespace
}  // namespace uniep::cuda_test

//   test_layer_emulated [all | fused [ORDERS]]
int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  using uniep::Fusion;
  namespace emulation = uniep::emulation;
  const bool all = argc > 1 && std::strcmp(argv[1], "all") == 0;      // minutes
  const bool fused = argc > 1 && std::strcmp(argv[1], "fused") == 0;  // the fused layer alone
  const int orders = argc > 2 ? std::atoi(argv[2]) : all ? 12 : 1;
  const LayerLimits limits{.num_sms = kSms,
                           .bf16 = GemmEngine::fma,
                           .f32_has_cpu_bits = true,
                           .ranks = {1, 2, 3, 5},
                           .stride = all ? 1 : 5};
  Report report;
  for (const LayerCase& c : fused_cases()) test_fused(report, c, orders);
  emulation::order_seed = 7;
  test_interleaved(report, GemmEngine::tensor_cores, uniep::DType::bf16, 6, Fusion::fused);
  emulation::order_seed = 0;
  if (fused) return report.finish();
  for (const LayerCase& c : layer_cases()) test_layer(report, c, limits);
  test_interleaved(report, GemmEngine::fma, uniep::DType::f32, kSms);
  test_interleaved(report, GemmEngine::fma, uniep::DType::bf16, kSms);
  test_layer_refusals(report, kSms);
  test_withheld_rank(report);
  return report.finish();
}
