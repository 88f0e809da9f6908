// SPDX-License-Identifier: Apache-2.0
// Cases: generated ones have the statistics they claim and survive a file; files whose tensors
// disagree are refused with the names of both.
#include "io/case.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>

#include "base/error.hpp"
#include "uniep/bf16.hpp"

namespace uniep {
namespace {

class CaseTest : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() / ("uniep-case-" + std::to_string(::getpid())))
                .string();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  // Changes a valid file and expects a refusal whose text has all `parts`.
  void expect_refused(const std::function<void(TensorFile&)>& change,
                      const std::vector<std::string>& parts) const;
  // Changes a valid file and expects it to load.
  [[nodiscard]] Case load_changed(const std::function<void(TensorFile&)>& change) const;

  std::string path_;
};

Case sample(DType dtype = DType::bf16, bool with_d_out = true) {
  const Shape shape{"small", 16, 8, 3, 2, 5};
  return make_case(shape, dtype, parse_routing("W0"), 2, 0, 1, with_d_out);
}

Case CaseTest::load_changed(const std::function<void(TensorFile&)>& change) const {
  save_case(path_, sample());
  TensorFile file = read_tensor_file(path_);
  change(file);
  write_tensor_file(path_, file);
  return load_case(path_);
}

void CaseTest::expect_refused(const std::function<void(TensorFile&)>& change,
                              const std::vector<std::string>& parts) const {
  try {
    static_cast<void>(load_changed(change));
    ADD_FAILURE() << "accepted; expected a refusal with: " << parts[0];
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << part << " is not in: " << error.what();
    }
  }
}

Tensor zeros(DType dtype, const std::vector<std::int64_t>& shape) {
  const auto bytes = tensor_bytes(dtype, shape).value();
  return {dtype, shape, std::vector<std::byte>(static_cast<std::size_t>(bytes))};
}

void expect_same(const Case& a, const Case& b) {
  EXPECT_EQ(a.dtype, b.dtype);
  EXPECT_EQ(a.num_tokens, b.num_tokens);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.ffn, b.ffn);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.topk, b.topk);
  EXPECT_EQ(a.tokens_per_rank, b.tokens_per_rank);
  EXPECT_EQ(a.topk_ids, b.topk_ids);
  EXPECT_EQ(a.topk_weights, b.topk_weights);
  EXPECT_EQ(a.x, b.x);
  EXPECT_EQ(a.w1, b.w1);
  EXPECT_EQ(a.w2, b.w2);
  EXPECT_EQ(a.d_out, b.d_out);
}

TEST_F(CaseTest, RoundTrip) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    for (const bool with_d_out : {false, true}) {
      const Case data = sample(dtype, with_d_out);
      save_case(path_, data);
      expect_same(data, load_case(path_));
    }
  }
  Case open_split = sample();
  open_split.tokens_per_rank.clear();
  save_case(path_, open_split);
  expect_same(open_split, load_case(path_));

  Shape empty{"empty", 8, 8, 1, 1, 0};
  const Case none = make_case(empty, DType::f32, parse_routing("W0"), 3, 0, 1, true);
  save_case(path_, none);
  expect_same(none, load_case(path_));
}

std::vector<float> values(const Case& data, const std::vector<std::byte>& bytes) {
  const Tensor tensor{data.dtype, {}, bytes};
  if (data.dtype == DType::f32) return tensor_values<float>(tensor);
  std::vector<float> wide;
  for (const Bf16 value : tensor_values<Bf16>(tensor)) wide.push_back(to_float(value));
  return wide;
}

double variance(const std::vector<float>& sample) {
  double squares = 0;
  for (const float value : sample)
    squares += static_cast<double>(value) * static_cast<double>(value);
  return squares / static_cast<double>(sample.size());
}

TEST_F(CaseTest, HasTheVariancesItClaims) {
  const Shape& tiny = find_shape("tiny");
  const Case data = make_case(tiny, DType::bf16, parse_routing("uniform"), 4, 0, 9, true);
  EXPECT_EQ(data.num_tokens, 256);
  EXPECT_NEAR(variance(values(data, data.x)), 1, 0.05);
  EXPECT_NEAR(variance(values(data, *data.d_out)), 1, 0.05);
  EXPECT_NEAR(variance(values(data, data.w1)) * 64, 1, 0.05);
  EXPECT_NEAR(variance(values(data, data.w2)) * 48, 1, 0.05);
  EXPECT_NE(data.x, *data.d_out);
}

TEST_F(CaseTest, IsTheSameForEveryRankCountAndDtypeRoundsIt) {
  const Shape& tiny = find_shape("tiny");
  const Case one = make_case(tiny, DType::f32, parse_routing("W0"), 1, 0, 9, false);
  const Case four = make_case(tiny, DType::f32, parse_routing("W0"), 4, 0, 9, false);
  const Case half = make_case(tiny, DType::bf16, parse_routing("W0"), 4, 0, 9, false);
  EXPECT_EQ(one.x, four.x);
  EXPECT_EQ(one.topk_ids, four.topk_ids);
  const auto wide = values(one, one.w1);
  const auto rounded = values(half, half.w1);
  ASSERT_EQ(wide.size(), rounded.size());
  for (std::size_t i = 0; i < wide.size(); ++i) ASSERT_EQ(to_float(to_bf16(wide[i])), rounded[i]);
}

// Large enough to be filled by several threads.
TEST_F(CaseTest, ThreadsDoNotChangeTheBits) {
  const Shape wide{"wide", 1024, 1024, 2, 1, 8};
  const Case data = make_case(wide, DType::bf16, parse_routing("W0"), 1, 0, 9, false);
  const Shape narrow{"narrow", 1024, 8, 2, 1, 8};
  const Case prefix = make_case(narrow, DType::bf16, parse_routing("W0"), 1, 0, 9, false);
  EXPECT_TRUE(std::equal(prefix.w1.begin(), prefix.w1.end(), data.w1.begin()));
  EXPECT_NEAR(variance(values(data, data.w1)) * 1024, 1, 0.01);
}

TEST_F(CaseTest, NamedShapes) {
  EXPECT_EQ(named_shapes().size(), 8U);
  EXPECT_EQ(find_shape("deepseek-v3").experts, 256);
  for (const Shape& shape : named_shapes()) EXPECT_EQ(&find_shape(shape.name), &shape);
  try {
    static_cast<void>(find_shape("huge"));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("kimi-k2"), std::string::npos);
  }
}

TEST_F(CaseTest, RefusesMissingTensors) {
  for (const char* name : {"x", "topk_ids", "topk_weights", "w1", "w2"}) {
    expect_refused([name](TensorFile& file) { file.tensors.erase(name); },
                   {std::string("no tensor ") + name});
  }
}

TEST_F(CaseTest, RefusesShapesThatDisagree) {
  const auto swap_in = [](const char* name, DType dtype, std::vector<std::int64_t> shape) {
    return [=](TensorFile& file) { file.tensors[name] = zeros(dtype, shape); };
  };
  const DType half = DType::bf16;
  expect_refused(swap_in("x", half, {80}), {"x", "[80]", "[tokens, hidden]"});
  expect_refused(swap_in("w1", half, {48, 16}), {"w1", "[experts, 2*ffn, hidden]"});
  expect_refused(swap_in("topk_ids", DType::i32, {4, 2}), {"x and topk_ids", "tokens", "[4, 2]"});
  expect_refused(swap_in("topk_weights", DType::f32, {6, 2}), {"x and topk_weights", "tokens"});
  expect_refused(swap_in("topk_weights", DType::f32, {5, 3}),
                 {"topk_ids and topk_weights", "topk"});
  expect_refused(swap_in("w1", half, {3, 16, 24}), {"x and w1", "hidden"});
  expect_refused(swap_in("w2", half, {3, 24, 8}), {"x and w2", "hidden"});
  expect_refused(swap_in("w2", half, {4, 16, 8}), {"w1 and w2", "experts"});
  expect_refused(swap_in("w2", half, {3, 16, 16}), {"w1 and w2", "ffn"});
  expect_refused(swap_in("w1", half, {3, 17, 16}), {"w1 and w2", "17 rows"});
  expect_refused(swap_in("d_out", half, {5, 24}), {"x and d_out", "hidden"});
  expect_refused(swap_in("d_out", half, {6, 16}), {"x and d_out", "tokens"});
}

TEST_F(CaseTest, RefusesDtypes) {
  const auto retype = [](const char* name, DType dtype) {
    return [=](TensorFile& file) { file.tensors[name] = zeros(dtype, file.tensors[name].shape); };
  };
  expect_refused(retype("x", DType::f64), {"tensor x", "F64", "BF16 or F32"});
  expect_refused(retype("w1", DType::f32), {"x and w1", "BF16 and F32"});
  expect_refused(retype("w2", DType::f32), {"x and w2"});
  expect_refused(retype("d_out", DType::f32), {"x and d_out"});
  expect_refused(retype("topk_ids", DType::f32), {"topk_ids", "I32 or I64"});
  expect_refused(retype("topk_weights", DType::bf16), {"topk_weights", "must be F32"});
  expect_refused(retype("tokens_per_rank", DType::f64), {"tokens_per_rank", "must be I64"});
}

TEST_F(CaseTest, RefusesIdsOutOfRange) {
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-2}, std::int64_t{1} << 32,
                                 std::numeric_limits<std::int64_t>::min()}) {
    expect_refused(
        [bad](TensorFile& file) {
          std::vector<std::int64_t> ids(10, 0);
          ids[5] = bad;
          file.tensors["topk_ids"] = make_tensor(DType::i64, {5, 2}, ids);
        },
        {"value " + std::to_string(bad), "token 2, choice 1", "from 0 to 2"});
  }
}

TEST_F(CaseTest, RefusesTokenCounts) {
  const auto counts = [](std::vector<std::int64_t> tokens) {
    return [=](TensorFile& file) {
      const auto num_ranks = static_cast<std::int64_t>(tokens.size());
      file.tensors["tokens_per_rank"] = make_tensor(DType::i64, {num_ranks}, tokens);
    };
  };
  expect_refused(counts({2, 2}), {"adds up to 4", "5 tokens"});
  expect_refused(counts({2, 4}), {"rank 1", "count 4"});
  expect_refused(counts({6, -1}), {"rank 0", "count 6"});
  expect_refused(counts({-1, 6}), {"rank 0", "count -1"});
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  expect_refused(counts({big, big, 7}), {"rank 0"});
  expect_refused(counts({}), {"0 ranks"});
  EXPECT_EQ(load_changed(counts({0, 5, 0})).tokens_per_rank.size(), 3U);
}

TEST_F(CaseTest, RefusesMetadataOfOtherVersions) {
  const auto set = [](const char* key, const char* value) {
    return [=](TensorFile& file) { file.metadata[key] = value; };
  };
  expect_refused(set("uniep_format", "2"), {"uniep_format", "'2'", "only '1'"});
  expect_refused(set("activation", "gelu"), {"activation", "'gelu'", "only 'swiglu'"});
  expect_refused(set("numerics", "fast"), {"numerics", "'fast'", "only 'default'"});
  static_cast<void>(load_changed([](TensorFile& file) { file.metadata = {{"format", "pt"}}; }));
}

TEST_F(CaseTest, AcceptsNaNMaskedChoicesAndOtherTensors) {
  const Case data = load_changed([](TensorFile& file) {
    file.tensors["topk_ids"] = make_tensor(DType::i64, {5, 2}, std::vector<std::int64_t>(10, -1));
    file.tensors["topk_weights"] = make_tensor(
        DType::f32, {5, 2}, std::vector<float>(10, std::numeric_limits<float>::quiet_NaN()));
    file.tensors["optimizer.step"] = zeros(DType::i64, {});
  });
  EXPECT_EQ(data.topk_ids, std::vector<std::int32_t>(10, -1));
  EXPECT_TRUE(std::isnan(data.topk_weights[9]));
}

TEST_F(CaseTest, RefusesSizes) {
  const auto make = [](const Shape& shape, DType dtype = DType::f32) {
    return make_case(shape, dtype, parse_routing("W0"), 1, 0, 0, false);
  };
  EXPECT_THROW(static_cast<void>(make({"a", 12, 8, 1, 1, 1})), Error);
  EXPECT_THROW(static_cast<void>(make({"a", 8, 0, 1, 1, 1})), Error);
  EXPECT_THROW(static_cast<void>(make({"a", 8, 8, 0, 1, 1})), Error);
  EXPECT_THROW(static_cast<void>(make({"a", 8, 8, 1, 65, 1})), Error);
  EXPECT_THROW(static_cast<void>(make({"a", 8, 8, 1, 1, -1})), Error);
  EXPECT_THROW(static_cast<void>(make({"a", 8, 8, 1, 1, 1}, DType::f64)), Error);
  const std::int64_t huge = std::int64_t{1} << 32;
  EXPECT_THROW(static_cast<void>(make({"a", huge, huge, 2, 1, 1})), Error);
}

}  // namespace
}  // namespace uniep
