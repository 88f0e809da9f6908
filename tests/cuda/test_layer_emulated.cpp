// SPDX-License-Identifier: Apache-2.0
// The split layer without a GPU: kernels and host code as they are, with virtual ranks. In f32 the
// results are the bits of the CPU's sequential path.
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

int main(int argc, char** argv) {
  using namespace uniep::cuda_test;
  const bool all = argc > 1 && std::strcmp(argv[1], "all") == 0;  // minutes
  const LayerLimits limits{.num_sms = kSms,
                           .bf16 = GemmEngine::fma,
                           .f32_has_cpu_bits = true,
                           .ranks = {1, 2, 3, 5},
                           .stride = all ? 1 : 5};
  Report report;
  for (const LayerCase& c : layer_cases()) test_layer(report, c, limits);
  test_interleaved(report, GemmEngine::fma, uniep::DType::f32, kSms);
  test_interleaved(report, GemmEngine::fma, uniep::DType::bf16, kSms);
  test_layer_refusals(report, kSms);
  test_withheld_rank(report);
  return report.finish();
}
