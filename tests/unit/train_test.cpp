// SPDX-License-Identifier: Apache-2.0
// The pieces of uniep train: derivatives against differences of the function itself, entropies and
// AdamW against values worked out by hand, and checkpoints that come back or are refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <functional>
#include <thread>

#include "base/error.hpp"
#include "base/rng.hpp"
#include "io/tensor_file.hpp"
#include "train/checkpoint.hpp"
#include "train/exchange.hpp"
#include "train/optimizer.hpp"
#include "train/rank_model.hpp"

namespace uniep::train {
namespace {

using Values = std::vector<float>;

Values normal(std::size_t n, std::uint64_t stream) {
  Rng rng(7, stream);
  Values values(n);
  for (float& value : values) value = rng.normal();
  return values;
}

double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * double{b[i]};
  return sum;
}

// (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h, whose own error is h⁴/30 of the fifth derivative:
// 5e-7 of it at h = 1/16. fp32 inside f adds about 1.5 times its rounding over h, which for the
// sizes here (some ten operations of values near 1) is 1.5 · 10 · 2⁻²⁴ · 16 = 1.4e-5.
constexpr float kStep = 0.0625F;
double slope(float& at, float step, const std::function<double()>& f) {
  const float middle = at;
  const auto value = [&](float offset) {
    at = middle + offset;
    return f();
  };
  const double inner = value(step) - value(-step);
  const double outer = value(2 * step) - value(-2 * step);
  at = middle;
  return (8 * inner - outer) / (12 * double{step});
}

// The distance of the whole gradient from the differences, relative to it. Ten times the error
// estimated above; a wrong term is in the order of 1.
constexpr double kTolerance = 2e-4;
void expect_gradient(Values& at, std::span<const float> gradient,
                     const std::function<double()>& f) {
  ASSERT_EQ(at.size(), gradient.size());
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < at.size(); ++i) {
    const double want = slope(at[i], kStep, f);
    error += (want - double{gradient[i]}) * (want - double{gradient[i]});
    norm += want * want;
  }
  ASSERT_GT(norm, 0);
  EXPECT_LT(std::sqrt(error / norm), kTolerance);
}

template <typename Body>
void expect_refused(Body body, const std::string& part) {
  try {
    body();
    ADD_FAILURE() << "accepted; expected a refusal with: " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(TrainGradient, Products) {
  constexpr std::int64_t m = 5, n = 7, k = 9, stride = 3;  // rows of a overlap, as in the mixing
  Values a = normal((m - 1) * stride + k, 1);
  Values w = normal(n * k, 2);
  const Values c = normal(m * n, 3);  // the function is Σ c y
  cpu::GemmScratch scratch;
  Values y(m * n);
  const auto f = [&] {
    multiply(a.data(), stride, w, m, n, k, y, scratch);
    return dot(c, y);
  };
  Values d_w(n * k);
  multiply_weights(c, a.data(), stride, m, n, k, d_w, scratch);
  expect_gradient(w, d_w, f);
  Values d_rows(m * k);
  multiply_back(c, w, m, n, k, d_rows, scratch);
  Values d_a(a.size());
  for (std::size_t i = 0; i < d_rows.size(); ++i) d_a[i / k * stride + i % k] += d_rows[i];
  expect_gradient(a, d_a, f);
}

TEST(TrainGradient, EmbeddingThroughOverlappingWindows) {
  constexpr std::int64_t context = 3, tokens = 6;
  const std::array<std::uint8_t, context + tokens - 1> bytes{5, 0, 5, 255, 7, 5, 5, 0};
  constexpr std::size_t window = context * kEmbeddingWidth;
  Values embedding = normal(kBytes * kEmbeddingWidth, 1);
  const Values c = normal(tokens * window, 2);
  Values embedded(bytes.size() * kEmbeddingWidth);
  const auto f = [&] {
    embed(bytes, embedding, embedded);
    double sum = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      sum += dot(std::span(c).subspan(t * window, window),
                 std::span(embedded).subspan(t * kEmbeddingWidth, window));
    }
    return sum;
  };
  Values d_embedding(embedding.size(), 99.0F);  // overwritten, also where no byte is
  embed_backward(bytes, c, context, d_embedding);
  expect_gradient(embedding, d_embedding, f);
}

TEST(TrainGradient, RmsNorm) {
  constexpr std::size_t tokens = 4, width = 13;  // not a multiple of the lanes
  Values x = normal(tokens * width, 1);
  Values gain = normal(width, 2);
  const Values c = normal(tokens * width, 3);
  Values y(x.size()), inverse(tokens);
  const auto f = [&] {
    rms_norm(x, gain, y, inverse);
    return dot(c, y);
  };
  f();
  Values d_x(x.size(), 1.0F), d_gain(width, 99.0F);
  rms_norm_backward(x, gain, inverse, c, d_x, d_gain);
  for (float& value : d_x) value -= 1.0F;  // it was added
  expect_gradient(x, d_x, f);
  expect_gradient(gain, d_gain, f);
}

TEST(TrainGradient, Router) {
  constexpr std::int64_t experts = 6, topk = 2, tokens = 5;
  Values logits = normal(tokens * experts, 1);
  const Values c = normal(tokens * topk, 2);
  const Values balance = normal(experts, 3);
  Values p = logits;
  Values weights(tokens * topk);
  std::vector<std::int32_t> ids(tokens * topk);
  route(p, experts, topk, ids, weights);
  // The choices are held where they are: the function is smooth only between changes of them.
  const auto f = [&] {
    Values q = logits, other_weights(weights.size());
    std::vector<std::int32_t> other_ids(ids.size());
    route(q, experts, topk, other_ids, other_weights);
    double sum = 0;
    for (std::size_t t = 0; t < tokens; ++t) {
      for (std::size_t j = 0; j < topk; ++j) {
        const auto e = static_cast<std::size_t>(ids[t * topk + j]);
        sum += double{c[t * topk + j]} * double{q[t * experts + e]};
      }
      sum += dot(balance, std::span(q).subspan(t * experts, experts));
    }
    return sum;
  };
  Values d_logits(logits.size(), 99.0F);
  route_backward(p, ids, c, balance, d_logits);
  expect_gradient(logits, d_logits, f);
}

TEST(TrainGradient, CrossEntropy) {
  const std::array<std::uint8_t, 3> targets{0, 17, 255};
  constexpr float scale = 0.25F;
  Values logits = normal(targets.size() * kBytes, 1);
  const auto f = [&] {
    Values work = logits;
    return double{scale} * cross_entropy(work, targets, scale);
  };
  Values d_logits = logits;
  cross_entropy(d_logits, targets, scale);
  expect_gradient(logits, d_logits, f);
}

TEST(TrainPieces, CrossEntropyOfEvenLogitsIsLog256) {
  Values logits(kBytes, -3.0F);
  const std::array<std::uint8_t, 1> target{9};
  EXPECT_NEAR(cross_entropy(logits, target, 1), std::log(256.0), 1e-12);
  // A hopeless byte costs its logit's distance, not infinity.
  logits.assign(kBytes, 0.0F);
  logits[9] = -1000.0F;
  EXPECT_NEAR(cross_entropy(logits, target, 1), std::log(255.0) + 1000, 1e-9);
}

TEST(TrainPieces, RouterTakesTheLikeliestAndTheLowerNumberOfEquals) {
  Values logits{1, 3, 3, 0, /**/ 0, 0, 0, 0, /**/ -1, 2, 5, 4};
  std::vector<std::int32_t> ids(6);
  Values weights(6);
  route(logits, 4, 2, ids, weights);
  EXPECT_EQ(ids, (std::vector<std::int32_t>{1, 2, 0, 1, 2, 3}));
  EXPECT_EQ(weights[2], 0.25F);
  EXPECT_EQ(weights[0], weights[1]);
  const double total = std::exp(-6.0) + std::exp(-3.0) + 1 + std::exp(-1.0);
  EXPECT_NEAR(weights[4], 1 / total, 1e-6);
  EXPECT_NEAR(weights[5], std::exp(-1.0) / total, 1e-6);
}

TEST(TrainPieces, BalancingLossByHand) {
  Config config;
  config.layers = 2;
  config.experts = 2;
  config.topk = 1;
  config.sequence = 4;
  // Two chunks. Layer 0: 5 of 8 choices and 4.5 of 8 probability on expert 0; layer 1: all, and 6.
  std::vector<ChunkResult> chunks(2, make_chunk_result(config, false));
  chunks[0].counts = {3, 1, 4, 0};
  chunks[1].counts = {2, 2, 4, 0};
  chunks[0].probabilities = {2.5, 1.5, 3, 1};
  chunks[1].probabilities = {2, 2, 3, 1};
  Values gradient(4);
  const double layer0 = 2 * (5.0 / 8 * 4.5 / 8 + 3.0 / 8 * 3.5 / 8);
  const double layer1 = 2 * (1 * 6.0 / 8);
  EXPECT_DOUBLE_EQ(balance_loss(config, chunks, gradient), (layer0 + layer1) / 2);
  const std::array<double, 4> shares{5.0 / 8, 3.0 / 8, 1, 0};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(gradient[i], static_cast<float>(0.01 * 2 * shares[i] / 8));
  }
}

TEST(TrainPieces, AdamWByHand) {
  // Step 1: m = 0.1 g and v = 0.01 g² are corrected to g and g²: the direction is the sign of g.
  const AdamWStep first(3.0, 1);
  EXPECT_FLOAT_EQ(first.rate, 0.1F);  // a thirtieth, still warming up
  EXPECT_FLOAT_EQ(AdamWStep(3.0, 30).rate, 3.0F);
  EXPECT_FLOAT_EQ(AdamWStep(3.0, 120).rate, 1.5F);
  const Values gradient{2.0F, -0.5F};
  Values value{1, 1}, m(2), v(2);
  adamw(first, gradient, false, value, m, v);
  EXPECT_NEAR(value[0], 0.9, 1e-6);
  EXPECT_NEAR(value[1], 1.1, 1e-6);
  EXPECT_FLOAT_EQ(m[0], 0.2F);
  EXPECT_NEAR(v[0], 0.04, 1e-7);
  // Decay takes rate * 0.01 of the value, whatever the gradient.
  Values still{2}, m0(1), v0(1);
  adamw(first, Values{0}, true, still, m0, v0);
  EXPECT_FLOAT_EQ(still[0], 2.0F * (1.0F - 0.001F));
}

TEST(TrainText, EntropiesByHand) {
  const auto bytes = [](const std::string& text) {
    return std::vector<std::uint8_t>(text.begin(), text.end());
  };
  EXPECT_DOUBLE_EQ(unigram_entropy(bytes("aabb")), 1.0);
  EXPECT_DOUBLE_EQ(unigram_entropy(bytes("aaab")), 0.25 * 2 + 0.75 * std::log2(4.0 / 3));
  EXPECT_DOUBLE_EQ(unigram_entropy(bytes("aaaa")), 0.0);
  EXPECT_DOUBLE_EQ(order1_entropy(bytes("abababab")), 0.0);
  // Pairs aa ab ba ab bb: after a, {a 1, b 2} of 3; after b, {a 1, b 1} of 2.
  const double after_a = std::log2(3.0) - 2.0 / 3;
  EXPECT_NEAR(order1_entropy(bytes("aababb")), (3 * after_a + 2 * 1.0) / 5, 1e-12);
  EXPECT_DOUBLE_EQ(order1_entropy(bytes("a")), 0.0);
}

Config small_config() {
  Config config;
  config.hidden = 16;
  config.ffn = 8;
  config.experts = 3;
  config.topk = 3;
  config.context = 4;
  config.sequence = 8;
  config.batch = 2;
  return config;
}

std::vector<std::uint8_t> sample_bytes(std::size_t n) {
  Rng rng(3);
  std::vector<std::uint8_t> bytes(n);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>('a' + rng.below(26));
  return bytes;
}

TEST(TrainText, WindowsStayInTheirPart) {
  Config config = small_config();
  const Text text = make_text(sample_bytes(200), config, "text");
  EXPECT_EQ(text.held_out().size(), 16U);  // 20, cut to whole sequences
  EXPECT_EQ(text.train_end, 184);
  std::int64_t low = 1000, high = 0;
  for (std::int64_t step = 0; step < 2000; ++step) {
    const std::int64_t window = window_of(text, config, step, step % config.batch);
    EXPECT_EQ(window, window_of(text, config, step, step % config.batch));
    low = std::min(low, window);
    high = std::max(high, window);
  }
  EXPECT_EQ(low, config.context);
  EXPECT_EQ(high, text.train_end - config.sequence);
  EXPECT_NE(window_of(text, config, 0, 0), window_of(text, config, 0, 1));
  expect_refused([&] { static_cast<void>(make_text(sample_bytes(83), config, "text T")); },
                 "text T has 83 bytes; with sequence 8 and context 4 it must have at least 84");
  EXPECT_EQ(make_text(sample_bytes(84), config, "").held_out().size(), 8U);
}

// All weights through the whole model. All experts are chosen, so that no choice can change.
TEST(TrainGradient, WholeModel) {
  const Config config = small_config();
  const Text text = make_text(sample_bytes(400), config, "text");
  ModelState state = make_model_state(config);
  GroupOptions options;
  options.num_experts = static_cast<int>(config.experts);
  options.topk = static_cast<int>(config.topk);
  options.hidden = config.hidden;
  options.ffn = config.ffn;
  options.max_tokens_per_rank = config.batch * config.sequence;
  options.dtype = DType::f32;
  Group group(options);
  RankModel model(state, text, group, 0, config.batch);
  const std::array<std::int64_t, 2> windows{10, 77};
  std::vector<ChunkResult> results(2, make_chunk_result(config, true));
  const double tokens = static_cast<double>(config.batch * config.sequence);
  const auto loss = [&] {
    model.forward(windows, true, static_cast<float>(1 / tokens), results);
    return (results[0].loss + results[1].loss) / tokens;
  };
  const double at_start = loss();
  EXPECT_NEAR(at_start, std::log(256.0), 0.1);
  model.backward(Values(count(config.layers * config.experts)), results);
  Values dense(results[0].gradient);
  for (std::size_t i = 0; i < dense.size(); ++i) dense[i] += results[1].gradient[i];

  // Along the gradient itself the slope is its norm; along any other direction, the product. The
  // whole model is curved more than a piece, so the step is an eighth: its error falls by 8⁴, and
  // that of rounding (of a mean over 16 tokens of losses near 5) grows to 1e-5.
  const auto check = [&](std::span<float> values, std::span<const float> gradient,
                         const std::string& name) {
    SCOPED_TRACE(name);
    const double norm = std::sqrt(dot(gradient, gradient));
    ASSERT_GT(norm, 0);
    const Values start(values.begin(), values.end());
    for (std::uint64_t trial = 0; trial < 3; ++trial) {
      Values direction = normal(values.size(), trial + 100);
      if (trial == 0) direction.assign(gradient.begin(), gradient.end());
      const double length = std::sqrt(dot(direction, direction));
      for (float& value : direction) value = static_cast<float>(double{value} / length);
      float offset = 0;
      const double want = slope(offset, kStep / 8, [&] {
        for (std::size_t i = 0; i < values.size(); ++i) {
          values[i] = start[i] + offset * direction[i];
        }
        return loss();
      });
      std::copy(start.begin(), start.end(), values.begin());
      EXPECT_NEAR(dot(gradient, direction), want, kTolerance * norm + 4e-5) << "trial " << trial;
    }
  };
  for (const DenseTensor& tensor : dense_tensors(config)) {
    const auto part = [&](Values& all) {
      return std::span(all).subspan(count(tensor.offset), count(tensor.size));
    };
    check(part(state.dense.value), part(dense), tensor.name);
  }
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const std::size_t l = count(layer);
    const Values d_w1(model.d_w1(layer).begin(), model.d_w1(layer).end());
    const Values d_w2(model.d_w2(layer).begin(), model.d_w2(layer).end());
    check(state.w1[l].value, d_w1, fmt::format("layer{}.w1", layer));
    check(state.w2[l].value, d_w2, fmt::format("layer{}.w2", layer));
  }
  EXPECT_EQ(loss(), at_start);
}

TEST(TrainConfig, RefusesWhatCannotRun) {
  Config config;
  validate(config);
  config.hidden = 65;
  expect_refused([&] { validate(config); }, "hidden is 65; it must be a multiple of 8");
  config = {};
  config.topk = 9;
  expect_refused([&] { validate(config); }, "topk is 9; with 8 experts it must be 1 to 8");
  config = {};
  config.learning_rate = std::nan("");
  expect_refused([&] { validate(config); }, "learning rate is nan");
}

class TrainCheckpoint : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "uniep-train-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = (folder_ / "a.safetensors").string();
    state_ = make_model_state(small_config());
    state_.config.learning_rate = 0.1;  // no binary fraction
    state_.step = 17;
    state_.loss_hash = 0x00ffee1234567890ULL;
    state_.dense.m = normal(state_.dense.m.size(), 50);
    state_.dense.v = normal(state_.dense.v.size(), 51);
    state_.w2[1].v = normal(state_.w2[1].v.size(), 52);
    text_.hash = 0xabcULL;
    save_checkpoint(path_, state_, text_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Changes the file, expects a refusal, and puts it back.
  template <typename Change>
  void expect_refused_after(Change change, const std::string& part) {
    TensorFile file = read_tensor_file(path_);
    const TensorFile good = file;
    change(file);
    write_tensor_file(path_, file);
    std::uint64_t hash = 0;
    expect_refused([&] { static_cast<void>(load_checkpoint(path_, hash)); }, part);
    write_tensor_file(path_, good);
  }

  std::filesystem::path folder_;
  std::string path_;
  ModelState state_;
  Text text_;
};

TEST_F(TrainCheckpoint, ComesBackBitForBit) {
  std::uint64_t hash = 0;
  const ModelState loaded = load_checkpoint(path_, hash);
  const auto equal = [](const Trained& a, const Trained& b) {
    return a.value == b.value && a.m == b.m && a.v == b.v;
  };
  EXPECT_EQ(loaded.config, state_.config);
  EXPECT_EQ(loaded.step, state_.step);
  EXPECT_EQ(loaded.loss_hash, state_.loss_hash);
  EXPECT_EQ(hash, text_.hash);
  EXPECT_TRUE(equal(loaded.dense, state_.dense));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(equal(loaded.w1[layer], state_.w1[layer]));
    EXPECT_TRUE(equal(loaded.w2[layer], state_.w2[layer]));
  }
}

TEST_F(TrainCheckpoint, RefusesWhatIsNone) {
  expect_refused_after([](TensorFile& f) { f.metadata.erase("uniep_train_format"); },
                       "is no checkpoint of uniep train");
  expect_refused_after([](TensorFile& f) { f.metadata.erase("hidden"); }, "has no hidden");
  expect_refused_after([](TensorFile& f) { f.metadata["ffn"] = "8x"; }, "'8x'");
  expect_refused_after([](TensorFile& f) { f.metadata["topk"] = "4"; }, "topk is 4");
  expect_refused_after([](TensorFile& f) { f.metadata["hidden"] = "24"; }, "its sizes need F32");
  expect_refused_after([](TensorFile& f) { f.metadata["step"] = "-1"; }, "step in");
  expect_refused_after([](TensorFile& f) { f.metadata["loss_hash"] = "12"; }, "16 hexadecimal");
  expect_refused_after([](TensorFile& f) { f.metadata.erase("text_hash"); }, "text_hash in");
  expect_refused_after([](TensorFile& f) { f.tensors.erase("adam_v.layer1.w2"); },
                       "has no tensor adam_v.layer1.w2");
  expect_refused_after([](TensorFile& f) { f.tensors["head"].shape = {16, 256}; }, "head in");
}

TEST(TrainExchange, AFailureEndsEveryMeeting) {
  Exchange exchange(3, std::chrono::hours(1));
  std::array<std::string, 2> seen;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          exchange.meet(rank, "test");
        } catch (const Error& error) {
          seen[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    exchange.fail(std::make_exception_ptr(Error(ErrorCode::world, "the cause")));
    exchange.fail(std::make_exception_ptr(Error(ErrorCode::world, "a consequence")));
  }
  EXPECT_EQ(seen[0], "rank 0 stopped because another rank failed");
  EXPECT_EQ(seen[1], "rank 1 stopped because another rank failed");
  try {
    exchange.rethrow();
    ADD_FAILURE() << "nothing to rethrow";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "the cause");
  }
}

TEST(TrainExchange, AMissingRankIsNoticed) {
  Exchange exchange(2, std::chrono::milliseconds(20));
  try {
    exchange.meet(1, "add up the losses");
    ADD_FAILURE() << "met nobody";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::world);
    EXPECT_STREQ(error.what(), "rank 1 waited 20 ms to add up the losses: 1 of 2 ranks came");
  }
}

}  // namespace
}  // namespace uniep::train
