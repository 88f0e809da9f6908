// SPDX-License-Identifier: Apache-2.0
// The expert layer from C++: two ranks (threads here) with their own tokens and experts, one step
// forward and backward, with the weight gradients added to fp32 main_grad.
//
// The same layer on one rank gives the same bits; the program compares them and says so.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <thread>
#include <uniep/layer.hpp>
#include <uniep/version.hpp>
#include <vector>

namespace {

constexpr int kExperts = 6;
constexpr int kTopk = 2;
constexpr std::int64_t kHidden = 32;
constexpr std::int64_t kFfn = 24;
constexpr std::int64_t kTokens = 40;  // over all ranks

struct Tensors {
  std::vector<float> x, topk_weights, w1, w2, out, d_out, d_x, d_topk_weights, d_w1, d_w2;
  std::vector<std::int32_t> topk_ids;
};

std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

std::vector<float> random_values(std::mt19937& random, std::int64_t n, float scale) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(count(n));
  for (float& value : values) value = normal(random);
  return values;
}

Tensors make_tensors() {
  std::mt19937 random(1);
  Tensors t;
  t.x = random_values(random, kTokens * kHidden, 1.0F);
  t.d_out = random_values(random, kTokens * kHidden, 1.0F);
  t.w1 = random_values(random, kExperts * 2 * kFfn * kHidden, 1.0F / std::sqrt(float(kHidden)));
  t.w2 = random_values(random, kExperts * kHidden * kFfn, 1.0F / std::sqrt(float(kFfn)));
  for (std::int64_t token = 0; token < kTokens; ++token) {
    const auto first = static_cast<std::int32_t>(random() % kExperts);
    t.topk_ids.push_back(first);
    t.topk_ids.push_back((first + 1) % kExperts);
    t.topk_weights.push_back(0.75F);
    t.topk_weights.push_back(0.25F);
  }
  t.out.resize(t.x.size());
  t.d_x.resize(t.x.size());
  t.d_topk_weights.resize(t.topk_weights.size());
  t.d_w1.resize(t.w1.size());  // main_grad: this step is added to what it holds, zero here
  t.d_w2.resize(t.w2.size());
  return t;
}

// One rank's part: tokens and experts are split evenly, both in order.
void run_rank(uniep::Group& group, int rank, Tensors& t) {
  const std::int64_t ranks = group.options().num_ranks;
  const std::int64_t tokens = kTokens / ranks, token = rank * tokens;
  const std::int64_t experts = kExperts / ranks, expert = rank * experts;
  const auto part = [](auto& values, std::int64_t start, std::int64_t length, std::int64_t width) {
    return std::span(values).subspan(count(start * width), count(length * width));
  };
  const auto w1 = std::as_bytes(part(t.w1, expert, experts, 2 * kFfn * kHidden));
  const auto w2 = std::as_bytes(part(t.w2, expert, experts, kHidden * kFfn));
  const auto topk_ids = part(t.topk_ids, token, tokens, kTopk);
  const auto topk_weights = part(t.topk_weights, token, tokens, kTopk);

  uniep::Layer layer(group, rank);
  const uniep::Saved saved =
      layer.forward({.x = std::as_bytes(part(t.x, token, tokens, kHidden)),
                     .topk_ids = topk_ids,
                     .topk_weights = topk_weights,
                     .w1 = w1,
                     .w2 = w2,
                     .out = std::as_writable_bytes(part(t.out, token, tokens, kHidden))});
  layer.backward(saved, {.d_out = std::as_bytes(part(t.d_out, token, tokens, kHidden)),
                         .w1 = w1,
                         .w2 = w2,
                         .d_x = std::as_writable_bytes(part(t.d_x, token, tokens, kHidden)),
                         .d_topk_weights = part(t.d_topk_weights, token, tokens, kTopk),
                         .d_w1 = part(t.d_w1, expert, experts, 2 * kFfn * kHidden),
                         .d_w2 = part(t.d_w2, expert, experts, kHidden * kFfn),
                         .accumulate = true});
}

Tensors run(int num_ranks, const uniep::Schedule& schedule) {
  Tensors t = make_tensors();
  uniep::GroupOptions options;
  options.num_ranks = num_ranks;
  options.num_experts = kExperts;
  options.topk = kTopk;
  options.hidden = kHidden;
  options.ffn = kFfn;
  options.max_tokens_per_rank = kTokens / num_ranks;
  options.dtype = uniep::DType::f32;
  options.schedule = schedule;
  uniep::Group group(options);
  std::vector<std::exception_ptr> errors(count(num_ranks));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          run_rank(group, rank, t);
        } catch (...) {
          errors[count(rank)] = std::current_exception();
        }
      });
    }
  }
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return t;
}

bool equal(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

int main() {
  try {
    std::printf("uniep %s\n", uniep::library_version());
    const Tensors one = run(1, {});
    const Tensors two = run(2, uniep::parse_schedule("payload=choice,direction=pull,workers=2"));
    const bool same = equal(one.out, two.out) && equal(one.d_x, two.d_x) &&
                      equal(one.d_topk_weights, two.d_topk_weights) && equal(one.d_w1, two.d_w1) &&
                      equal(one.d_w2, two.d_w2);
    std::printf("out[0] = %g, d_x[0] = %g\n", one.out[0], one.d_x[0]);
    std::printf("1 rank and 2 ranks, another schedule: %s\n", same ? "the same bits" : "NOT EQUAL");
    return same ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "01_layer: %s\n", error.what());
    return 3;
  }
}
