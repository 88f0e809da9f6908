// SPDX-License-Identifier: Apache-2.0
// The C interface: the bits of the C++ classes, a code and a sentence for every mistake.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "base/rng.hpp"
#include "uniep/layer.hpp"
#include "uniep/uniep.h"

namespace uniep {
namespace {

constexpr int kRanks = 2, kExperts = 5, kTopk = 2, kTokens = 7, kHidden = 16, kFfn = 24;
constexpr std::size_t kW2 = std::size_t{kHidden} * kFfn;

std::vector<float> normals(std::size_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> values(count);
  for (float& value : values) value = rng.normal();
  return values;
}

// One rank's tensors; the results start as NaN patterns.
struct Tensors {
  Tensors(int rank, int local)
      : x(normals(kTokens * kHidden, 10 + static_cast<std::uint64_t>(rank))),
        d_out(normals(kTokens * kHidden, 20 + static_cast<std::uint64_t>(rank))),
        topk_weights(normals(kTokens * kTopk, 30 + static_cast<std::uint64_t>(rank))),
        w1(normals(static_cast<std::size_t>(local) * 2 * kW2,
                   40 + static_cast<std::uint64_t>(rank))),
        w2(normals(static_cast<std::size_t>(local) * kW2, 50 + static_cast<std::uint64_t>(rank))),
        d_w1(w1.size(), 1.0F),
        d_w2(w2.size(), 1.0F) {
    for (int i = 0; i < kTokens * kTopk; ++i) topk_ids.push_back((i * 3 + rank) % kExperts);
    topk_ids[4] = -1;
  }
  [[nodiscard]] uniep_forward_args forward() {
    uniep_forward_args args;
    uniep_forward_args_init(&args);
    args.num_tokens = kTokens;
    args.x = x.data();
    args.topk_ids = topk_ids.data();
    args.topk_weights = topk_weights.data();
    args.w1 = w1.data();
    args.w2 = w2.data();
    args.out = out.data();
    return args;
  }
  [[nodiscard]] uniep_backward_args backward(bool accumulate) {
    uniep_backward_args args;
    uniep_backward_args_init(&args);
    args.d_out = d_out.data();
    args.w1 = w1.data();
    args.w2 = w2.data();
    args.d_x = d_x.data();
    args.d_topk_weights = d_topk_weights.data();
    args.d_w1 = d_w1.data();
    args.d_w2 = d_w2.data();
    args.accumulate = accumulate ? 1 : 0;
    return args;
  }
  [[nodiscard]] bool same_results(const Tensors& other) const {
    return out == other.out && d_x == other.d_x && d_topk_weights == other.d_topk_weights &&
           d_w1 == other.d_w1 && d_w2 == other.d_w2;
  }
  std::vector<float> x, d_out, topk_weights, w1, w2, d_w1, d_w2;
  std::vector<float> out = std::vector<float>(kTokens * kHidden, -7.0F), d_x = out;
  std::vector<float> d_topk_weights = std::vector<float>(kTokens * kTopk, -7.0F);
  std::vector<std::int32_t> topk_ids;
};

uniep_group_options options_of(int ranks) {
  uniep_group_options options;
  uniep_group_options_init(&options);
  options.num_ranks = ranks;
  options.num_experts = kExperts;
  options.topk = kTopk;
  options.dtype = UNIEP_F32;
  options.hidden = kHidden;
  options.ffn = kFfn;
  options.max_tokens_per_rank = kTokens;
  return options;
}

// The handles of one rank alone, destroyed whatever a test does.
struct Handles {
  Handles() {
    const auto options = options_of(1);
    EXPECT_EQ(uniep_group_create(&options, &group), UNIEP_OK) << uniep_last_error();
    EXPECT_EQ(uniep_layer_create(group, 0, &layer), UNIEP_OK) << uniep_last_error();
  }
  ~Handles() {
    uniep_saved_destroy(saved);
    uniep_layer_destroy(layer);
    uniep_group_destroy(group);
  }
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;
  uniep_group* group = nullptr;
  uniep_layer* layer = nullptr;
  uniep_saved* saved = nullptr;
};

void expect_refused(uniep_status status, const std::string& part) {
  EXPECT_EQ(status, UNIEP_INVALID_ARGUMENT) << part;
  EXPECT_NE(std::string(uniep_last_error()).find(part), std::string::npos)
      << part << " is not in: " << uniep_last_error();
}

template <typename T>
std::span<const std::byte> bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}
template <typename T>
std::span<std::byte> writable(std::vector<T>& values) {
  return std::as_writable_bytes(std::span(values));
}

TEST(CInterface, HasTheBitsOfTheClasses) {
  auto options = options_of(kRanks);
  const std::vector<std::int32_t> owner{1, 0, 0, 1, 0};
  options.rank_of_expert = owner.data();
  options.schedule = "workers=2,direction=pull,tile_m=8";
  uniep_group* group = nullptr;
  ASSERT_EQ(uniep_group_create(&options, &group), UNIEP_OK) << uniep_last_error();
  GroupOptions same;
  same.num_ranks = kRanks;
  same.num_experts = kExperts;
  same.topk = kTopk;
  same.hidden = kHidden;
  same.ffn = kFfn;
  same.max_tokens_per_rank = kTokens;
  same.dtype = DType::f32;
  same.rank_of_expert = owner;
  Group classes(same);
  std::vector<Tensors> by_c, by_classes;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::int32_t local = 0;
    std::vector<std::int32_t> ids(kExperts);
    ASSERT_EQ(uniep_group_local_experts(group, rank, &local, ids.data()), UNIEP_OK);
    ids.resize(static_cast<std::size_t>(local));
    EXPECT_EQ(ids, classes.experts_of(rank));
    by_c.emplace_back(rank, local);
    by_classes.emplace_back(rank, local);
  }
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        Tensors& t = by_c[static_cast<std::size_t>(rank)];
        uniep_layer* layer = nullptr;
        uniep_saved* saved = nullptr;
        const auto forward = t.forward();
        const auto backward = t.backward(true);
        EXPECT_EQ(uniep_layer_create(group, rank, &layer), UNIEP_OK) << uniep_last_error();
        EXPECT_EQ(uniep_layer_forward(layer, &forward, &saved), UNIEP_OK) << uniep_last_error();
        EXPECT_EQ(uniep_layer_backward(layer, saved, &backward), UNIEP_OK) << uniep_last_error();
        uniep_saved_destroy(saved);
        uniep_layer_destroy(layer);
      });
      threads.emplace_back([&, rank] {
        Tensors& t = by_classes[static_cast<std::size_t>(rank)];
        Layer layer(classes, rank);
        const Saved saved = layer.forward({.x = bytes(t.x),
                                           .topk_ids = t.topk_ids,
                                           .topk_weights = t.topk_weights,
                                           .w1 = bytes(t.w1),
                                           .w2 = bytes(t.w2),
                                           .out = writable(t.out)});
        layer.backward(saved, {.d_out = bytes(t.d_out),
                               .w1 = bytes(t.w1),
                               .w2 = bytes(t.w2),
                               .d_x = writable(t.d_x),
                               .d_topk_weights = t.d_topk_weights,
                               .d_w1 = t.d_w1,
                               .d_w2 = t.d_w2,
                               .accumulate = true});
      });
    }
  }
  uniep_group_destroy(group);
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(by_c[rank].same_results(by_classes[rank])) << "rank " << rank;
    EXPECT_NE(by_c[rank].out[0], -7.0F);
  }
}

TEST(CInterface, RefusesStructsOfAnUnknownSize) {
  Handles one;
  Tensors t(0, kExperts);
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, sizeof(uniep_forward_args) + 8}) {
    auto options = options_of(1);
    options.size = size == sizeof(uniep_forward_args) + 8 ? sizeof options + 8 : size;
    uniep_group* group = one.group;
    expect_refused(uniep_group_create(&options, &group), "options.size is");
    EXPECT_EQ(group, nullptr);
    auto forward = t.forward();
    forward.size = size;
    expect_refused(uniep_layer_forward(one.layer, &forward, nullptr), "args.size is");
    ASSERT_EQ(uniep_layer_recover(one.layer), UNIEP_OK);
  }
}

TEST(CInterface, RefusesNull) {
  Tensors t(0, kExperts);
  const auto options = options_of(1);
  expect_refused(uniep_group_create(&options, nullptr), "group is NULL");
  int nothing = 0;
  auto* group = reinterpret_cast<uniep_group*>(&nothing);
  expect_refused(uniep_group_create(nullptr, &group), "options is NULL");
  EXPECT_EQ(group, nullptr) << "a failed call leaves no handle";
  ASSERT_EQ(uniep_group_create(&options, &group), UNIEP_OK);
  std::int32_t local = 0;
  uniep_layer* none = nullptr;
  expect_refused(uniep_layer_create(nullptr, 0, &none), "group is NULL");
  expect_refused(uniep_layer_create(group, 0, nullptr), "layer is NULL");
  expect_refused(uniep_group_local_experts(nullptr, 0, &local, nullptr), "group is NULL");
  expect_refused(uniep_group_local_experts(group, 0, nullptr, nullptr), "num_local_experts");
  expect_refused(uniep_group_local_experts(group, 1, &local, nullptr), "rank is 1");
  const auto forward = t.forward();
  const auto backward = t.backward(false);
  expect_refused(uniep_layer_forward(nullptr, &forward, nullptr), "layer is NULL");
  expect_refused(uniep_layer_backward(nullptr, nullptr, &backward), "layer is NULL");
  expect_refused(uniep_layer_recover(nullptr), "layer is NULL");
  uniep_layer* layer = nullptr;
  ASSERT_EQ(uniep_layer_create(group, 0, &layer), UNIEP_OK);
  expect_refused(uniep_layer_backward(layer, nullptr, &backward), "saved is NULL");
  ASSERT_EQ(uniep_layer_recover(layer), UNIEP_OK);
  expect_refused(uniep_layer_forward(layer, nullptr, nullptr), "args is NULL");
  ASSERT_EQ(uniep_layer_recover(layer), UNIEP_OK);
  auto no_x = t.forward();
  no_x.x = nullptr;
  expect_refused(uniep_layer_forward(layer, &no_x, nullptr), "x is NULL");
  ASSERT_EQ(uniep_layer_recover(layer), UNIEP_OK);
  EXPECT_EQ(uniep_layer_forward(layer, &forward, nullptr), UNIEP_OK) << uniep_last_error();
  uniep_layer_destroy(layer);
  uniep_group_destroy(group);
  uniep_group_options_init(nullptr);
  uniep_forward_args_init(nullptr);
  uniep_backward_args_init(nullptr);
  uniep_saved_destroy(nullptr);
  uniep_layer_destroy(nullptr);
  uniep_group_destroy(nullptr);
}

TEST(CInterface, RefusesValuesWithASentence) {
  const auto refused = [](auto change, const std::string& part) {
    auto options = options_of(1);
    change(options);
    uniep_group* group = nullptr;
    expect_refused(uniep_group_create(&options, &group), part);
    EXPECT_EQ(group, nullptr);
  };
  refused([](auto& o) { o.dtype = 2; }, "dtype is 2");
  refused([](auto& o) { o.wait_bound_ms = 0; }, "wait_bound_ms is 0");
  refused([](auto& o) { o.schedule = "speed=11"; }, "speed");
  refused([](auto& o) { o.num_ranks = 0; }, "ranks");
  refused([](auto& o) { o.num_experts = 0; }, "experts");
  refused([](auto& o) { o.topk = 65; }, "topk is 65");
  refused([](auto& o) { o.hidden = 0; }, "hidden is 0");
  refused([](auto& o) { o.ffn = -1; }, "ffn is -1");
  refused([](auto& o) { o.max_tokens_per_rank = -1; }, "max_tokens_per_rank is -1");
  refused([](auto& o) { o.max_tokens_per_rank = std::int64_t{1} << 62; }, "max_tokens_per_rank is");
  refused(
      [](auto& o) {
        o.num_ranks = 1024;
        o.schedule = "workers=5";
      },
      "5120 threads");
  Handles one;
  Tensors t(0, kExperts);
  for (const std::int64_t tokens : {-1, kTokens + 1}) {
    auto forward = t.forward();
    forward.num_tokens = tokens;
    expect_refused(uniep_layer_forward(one.layer, &forward, &one.saved), "num_tokens is");
    EXPECT_EQ(one.saved, nullptr);
    ASSERT_EQ(uniep_layer_recover(one.layer), UNIEP_OK);
  }
  t.topk_ids[3] = kExperts;
  const auto forward = t.forward();
  expect_refused(uniep_layer_forward(one.layer, &forward, &one.saved),
                 "topk_ids of token 1, choice 1 is 5");
  EXPECT_EQ(one.saved, nullptr);
  uniep_layer* second = nullptr;
  expect_refused(uniep_layer_create(one.group, 0, &second), "one at a time");
  // A group that failed: the world's fault until all recover.
  t.topk_ids[3] = 0;
  EXPECT_EQ(uniep_layer_forward(one.layer, &forward, &one.saved), UNIEP_WORLD);
  EXPECT_NE(std::string(uniep_last_error()).find("recover"), std::string::npos);
  ASSERT_EQ(uniep_layer_recover(one.layer), UNIEP_OK);
  EXPECT_EQ(uniep_layer_forward(one.layer, &forward, &one.saved), UNIEP_OK);
}

TEST(CInterface, LastErrorIsOfItsThread) {
  expect_refused(uniep_layer_recover(nullptr), "layer is NULL");
  std::jthread([] { EXPECT_STREQ(uniep_last_error(), ""); }).join();
  EXPECT_STREQ(uniep_last_error(), "layer is NULL");
  EXPECT_GT(std::strlen(uniep_version()), 4U);
}

}  // namespace
}  // namespace uniep
