// SPDX-License-Identifier: Apache-2.0
#include "grouped_gemm_refusals.hpp"

#include <functional>

#include "base/error.hpp"
#include "cuda/grouped_gemm.hpp"

namespace uniep::cuda_test {
namespace {

using cuda::ElementType;
using cuda::GemmOp;

struct Call {
  GemmOp op = GemmOp::fprop;
  ElementType operand = ElementType::bf16;
  ElementType out = ElementType::bf16;
  cuda::ExpertRows experts;
  cuda::GroupedGemm problem;
  cuda::GemmLaunch launch{};
};

struct Attempt {
  const char* what;
  std::function<void(Call&)> spoil;
};

const std::vector<Attempt>& attempts() {
  static const std::vector<Attempt> list{
      {"n that is no multiple of 8", [](Call& c) { c.problem.n = 68; }},
      {"n of half a gate row block",
       [](Call& c) {
         c.op = GemmOp::fprop_swiglu;
         c.problem.n = 72;
       }},
      {"k of zero", [](Call& c) { c.problem.k = 0; }},
      {"a pointer off its boundary",
       [](Call& c) { c.problem.x = static_cast<const char*>(c.problem.x) + 8; }},
      {"a missing operand",
       [](Call& c) {
         c.op = GemmOp::dgrad;
         c.problem.d_y = nullptr;
       }},
      {"fp8 operands", [](Call& c) { c.operand = ElementType::f8_e4m3; }},
      {"fp32 out of fprop", [](Call& c) { c.out = ElementType::f32; }},
      {"capacity that is no multiple of 64", [](Call& c) { c.experts.capacity = 100; }},
      {"too many experts", [](Call& c) { c.experts.num_experts = 4096; }},
      {"accumulation into bf16",
       [](Call& c) {
         c.op = GemmOp::wgrad;
         c.problem.accumulate = true;
       }},
      {"h of a plain fprop", [](Call& c) { c.problem.h = c.problem.out; }},
      {"one SM", [](Call& c) { c.launch.num_sms = 1; }},
  };
  return list;
}

}  // namespace

std::vector<Refusal> try_refusals(void* memory) {
  std::vector<Refusal> refusals;
  for (const Attempt& attempt : attempts()) {
    const auto* counts = static_cast<const std::int64_t*>(memory);
    Call call{
        .experts = {counts, counts, 1, 64},
        .problem = {.n = 64, .k = 64, .x = memory, .d_y = memory, .w = memory, .out = memory}};
    attempt.spoil(call);
    Refusal refusal{.what = attempt.what};
    try {
      cuda::run_grouped_gemm(call.op, call.operand, call.out, call.experts, {&call.problem, 1},
                             call.launch);
    } catch (const Error& error) {
      refusal.refused = error.code() == ErrorCode::invalid_argument;
      refusal.text = error.what();
    }
    refusals.push_back(refusal);
  }
  return refusals;
}

}  // namespace uniep::cuda_test
