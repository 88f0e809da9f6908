// SPDX-License-Identifier: Apache-2.0
// Cases from generators and from files. Both pass the same checks of sizes, so that whatever can be
// generated can also be saved and loaded.
#include "io/case.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "base/rng.hpp"
#include "uniep/bf16.hpp"

namespace uniep {
namespace {

constexpr std::int64_t kSizeMultiple = 8;  // of hidden and ffn: 16 bytes of bf16
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 32;

const std::array<Shape, 8> kShapes = {{
    {"tiny", 64, 48, 8, 2, 256},
    {"mixtral-8x7b", 4096, 14336, 8, 2, 0},
    {"qwen3-30b-a3b", 2048, 768, 128, 8, 0},
    {"qwen3-235b-a22b", 4096, 1536, 128, 8, 0},
    {"deepseek-v2-lite", 2048, 1408, 64, 6, 0},
    {"deepseek-v3", 7168, 2048, 256, 8, 0},
    {"kimi-k2", 7168, 2048, 384, 8, 0},
    {"gpt-oss-120b", 2880, 2880, 128, 4, 0},
}};

using Dims = std::vector<std::int64_t>;

// Sizes that must hold wherever a case comes from. `where` names the case in the error text.
void check_sizes(const Case& data, const std::string& where) {
  const auto check_width = [&where](std::string_view name, std::int64_t value) {
    if (value < kSizeMultiple || value > kMaxWidth || value % kSizeMultiple != 0) {
      throw_invalid("{} of {} is {}; it must be a multiple of {} from {} to {}", name, where, value,
                    kSizeMultiple, kSizeMultiple, kMaxWidth);
    }
  };
  check_width("hidden", data.hidden);
  check_width("ffn", data.ffn);
  constexpr std::int64_t kMaxExperts = std::numeric_limits<std::int32_t>::max();
  if (data.num_experts < 1 || data.num_experts > kMaxExperts) {
    throw_invalid("the number of experts of {} is {}; it must be 1 to {}", where, data.num_experts,
                  kMaxExperts);
  }
  if (data.topk < 1 || data.topk > kMaxTopk) {
    throw_invalid("topk of {} is {}; it must be 1 to {}", where, data.topk, kMaxTopk);
  }
  if (data.num_tokens < 0) {
    throw_invalid("the number of tokens of {} is {}; it must be at least 0", where,
                  data.num_tokens);
  }
}

void check_dtype(DType dtype, std::string_view tensor, const std::string& where) {
  if (dtype != DType::bf16 && dtype != DType::f32) {
    throw_invalid("{} of {} is {}; it must be BF16 or F32", tensor, where, dtype_name(dtype));
  }
}

// Fills values [begin, end) of the tensor that `rng` stands for.
void fill_range(DType dtype, Rng rng, float scale, std::size_t begin, std::size_t end,
                std::byte* out) {
  rng.seek(begin * Rng::kDrawsPerNormal);
  for (std::size_t i = begin; i < end; ++i) {
    const float value = rng.normal() * scale;
    if (dtype == DType::bf16) {
      const Bf16 rounded = to_bf16(value);
      std::memcpy(out + i * sizeof(rounded), &rounded, sizeof(rounded));
    } else {
      std::memcpy(out + i * sizeof(value), &value, sizeof(value));
    }
  }
}

std::int64_t checked_bytes(DType dtype, const Dims& dims) {
  const auto bytes = tensor_bytes(dtype, dims);
  if (!bytes) throw_invalid("a tensor of shape {} is too large for any file", shape_text(dims));
  return *bytes;
}

// N(0, 1/contraction) values. The bits do not depend on the number of threads.
std::vector<std::byte> random_tensor(DType dtype, const Dims& dims, std::int64_t contraction,
                                     std::uint64_t seed, std::uint64_t stream) {
  std::vector<std::byte> data(static_cast<std::size_t>(checked_bytes(dtype, dims)));
  const std::size_t count = data.size() / static_cast<std::size_t>(dtype_bytes(dtype));
  const Rng rng(seed, stream);
  const float scale = 1.0F / std::sqrt(static_cast<float>(contraction));

  constexpr std::size_t kMinPerThread = std::size_t{1} << 20;
  const std::size_t max_threads = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t num_threads = std::clamp<std::size_t>(count / kMinPerThread, 1, max_threads);
  const std::size_t per_thread = (count + num_threads - 1) / num_threads;
  std::vector<std::jthread> threads;
  for (std::size_t begin = per_thread; begin < count; begin += per_thread) {
    threads.emplace_back(fill_range, dtype, rng, scale, begin, std::min(count, begin + per_thread),
                         data.data());
  }
  fill_range(dtype, rng, scale, 0, std::min(count, per_thread), data.data());
  threads.clear();  // joins
  return data;
}

// About what the tensors of a case take.
double case_bytes(const Case& data, bool with_d_out) {
  const auto element = static_cast<double>(dtype_bytes(data.dtype));
  const auto tokens = static_cast<double>(data.num_tokens);
  const auto hidden = static_cast<double>(data.hidden);
  return element *
             ((with_d_out ? 2 : 1) * tokens * hidden +
              3 * static_cast<double>(data.num_experts) * hidden * static_cast<double>(data.ffn)) +
         8 * tokens * static_cast<double>(data.topk);
}

// The tensors of one file, with errors that name it.
class CaseFile {
 public:
  explicit CaseFile(const std::string& path)
      : path_(path), where_("case file " + quote(path)), file_(read_tensor_file(path)) {}

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] const std::string& where() const { return where_; }
  [[nodiscard]] bool has(const std::string& name) const { return file_.tensors.contains(name); }

  const Tensor& check_dims(const std::string& name, std::size_t num_dims, std::string_view dims) {
    const auto found = file_.tensors.find(name);
    if (found == file_.tensors.end()) throw_invalid("{} has no tensor {}", where_, name);
    if (found->second.shape.size() != num_dims) {
      throw_invalid("tensor {} of {} has the shape {}; it must be {}", name, where_,
                    shape_text(found->second.shape), dims);
    }
    return found->second;
  }

  // A tensor that the check_dims has passed.
  Tensor& get(const std::string& name) { return file_.tensors.at(name); }

  std::int64_t dim(const std::string& name, std::size_t index) { return get(name).shape.at(index); }

  void check_equal(std::string_view what, const std::string& a, std::size_t a_dim,
                   const std::string& b, std::size_t b_dim) {
    if (dim(a, a_dim) == dim(b, b_dim)) return;
    throw_invalid("tensors {} and {} of {} disagree on {}: their shapes are {} and {}", a, b,
                  where_, what, shape_text(file_.tensors.at(a).shape),
                  shape_text(file_.tensors.at(b).shape));
  }

  void check_metadata(const std::string& key, std::string_view only) const {
    const auto found = file_.metadata.find(key);
    if (found == file_.metadata.end() || found->second == only) return;
    throw_invalid("metadata {} of {} is {}; only '{}' is served", key, where_, quote(found->second),
                  only);
  }

 private:
  std::string path_;
  std::string where_;
  TensorFile file_;
};

std::vector<std::int64_t> load_tokens_per_rank(CaseFile& file, std::int64_t num_tokens) {
  const Tensor& tensor = file.check_dims("tokens_per_rank", 1, "[ranks]");
  if (tensor.dtype != DType::i64) {
    throw_invalid("tensor tokens_per_rank of {} is {}; it must be I64", file.where(),
                  dtype_name(tensor.dtype));
  }
  if (tensor.shape[0] < 1 || tensor.shape[0] > kMaxRanks) {
    throw_invalid("tensor tokens_per_rank of {} names {} ranks; there must be 1 to {}",
                  file.where(), tensor.shape[0], kMaxRanks);
  }
  auto tokens = tensor_values<std::int64_t>(tensor);
  std::int64_t left = num_tokens;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    if (tokens[rank] < 0 || tokens[rank] > left) {
      throw_invalid(
          "tensor tokens_per_rank of {} gives rank {} the count {}, but {} of the {} tokens "
          "of x are left for it",
          file.where(), rank, tokens[rank], left, num_tokens);
    }
    left -= tokens[rank];
  }
  if (left != 0) {
    throw_invalid("tensor tokens_per_rank of {} adds up to {}, but x has {} tokens", file.where(),
                  num_tokens - left, num_tokens);
  }
  return tokens;
}

// Takes the bytes of a tensor that must share the dtype of x.
std::vector<std::byte> take_data(CaseFile& file, const Case& data, const std::string& name) {
  Tensor& tensor = file.get(name);
  if (tensor.dtype != data.dtype) {
    throw_invalid("tensors x and {} of {} differ in dtype, {} and {}; they must share one", name,
                  file.where(), dtype_name(data.dtype), dtype_name(tensor.dtype));
  }
  return std::move(tensor.data);
}

// Presence, number of dimensions and agreement of all tensors; fills the sizes.
Case load_sizes(CaseFile& file) {
  file.check_metadata("uniep_format", "1");
  file.check_metadata("activation", "swiglu");
  file.check_metadata("numerics", "default");
  Case data;
  data.dtype = file.check_dims("x", 2, "[tokens, hidden]").dtype;
  check_dtype(data.dtype, "tensor x", file.where());
  file.check_dims("topk_ids", 2, "[tokens, topk]");
  file.check_dims("topk_weights", 2, "[tokens, topk]");
  file.check_dims("w1", 3, "[experts, 2*ffn, hidden]");
  file.check_dims("w2", 3, "[experts, hidden, ffn]");
  file.check_equal("tokens", "x", 0, "topk_ids", 0);
  file.check_equal("tokens", "x", 0, "topk_weights", 0);
  file.check_equal("topk", "topk_ids", 1, "topk_weights", 1);
  file.check_equal("hidden", "x", 1, "w1", 2);
  file.check_equal("hidden", "x", 1, "w2", 1);
  file.check_equal("experts", "w1", 0, "w2", 0);
  data.num_tokens = file.dim("x", 0);
  data.hidden = file.dim("x", 1);
  data.ffn = file.dim("w2", 2);
  data.num_experts = file.dim("w1", 0);
  data.topk = file.dim("topk_ids", 1);
  check_sizes(data, file.where());
  const std::int64_t w1_rows = file.dim("w1", 1);
  if (w1_rows % 2 != 0 || w1_rows / 2 != data.ffn) {
    throw_invalid(
        "tensors w1 and w2 of {} disagree on ffn: w1 has {} rows an expert, and w2, with "
        "ffn {}, needs twice that",
        file.where(), w1_rows, data.ffn);
  }
  if (file.has("d_out")) {
    file.check_dims("d_out", 2, "[tokens, hidden]");
    file.check_equal("tokens", "x", 0, "d_out", 0);
    file.check_equal("hidden", "x", 1, "d_out", 1);
  }
  return data;
}

}  // namespace

std::span<const Shape> named_shapes() { return kShapes; }

const Shape& find_shape(std::string_view name) {
  std::string known;
  for (const Shape& shape : kShapes) {
    if (shape.name == name) return shape;
    known += (known.empty() ? "" : ", ") + shape.name;
  }
  throw_invalid("shape {} is unknown; valid are {}", quote(name), known);
}

Case make_case(const Shape& shape, DType dtype, const RoutingSpec& routing, int num_ranks,
               double mask, std::uint64_t seed, bool with_d_out) {
  Case data;
  data.dtype = dtype;
  data.num_tokens = shape.tokens;
  data.hidden = shape.hidden;
  data.ffn = shape.ffn;
  data.num_experts = shape.experts;
  data.topk = shape.topk;
  const std::string where = shape.name.empty() ? "the shape" : "shape " + quote(shape.name);
  check_dtype(dtype, "the dtype", where);
  check_sizes(data, where);
  // Another seed than the routing's, so that no stream is used twice.
  enum Stream : std::uint64_t { kX, kW1, kW2, kDOut };
  constexpr std::uint64_t kTensorSeed = 0x756E696570000000U;
  const std::uint64_t tensor_seed = seed ^ kTensorSeed;
  const Dims token_dims = {data.num_tokens, data.hidden};
  const Dims w1_dims = {data.num_experts, 2 * data.ffn, data.hidden};
  const Dims w2_dims = {data.num_experts, data.hidden, data.ffn};
  // All before any is made: the first could fill the memory before the second is refused.
  for (const Dims* dims : {&token_dims, &w1_dims, &w2_dims}) {
    static_cast<void>(checked_bytes(dtype, *dims));
  }
  require_memory(case_bytes(data, with_d_out),
                 fmt::format("{} with {} tokens", where, data.num_tokens));
  try {
    Routing made =
        make_routing(routing, num_ranks, data.num_tokens, static_cast<int>(data.num_experts),
                     static_cast<int>(data.topk), mask, seed, 0);
    data.tokens_per_rank = std::move(made.tokens_per_rank);
    data.topk_ids = std::move(made.topk_ids);
    data.topk_weights = std::move(made.topk_weights);
    data.x = random_tensor(dtype, token_dims, 1, tensor_seed, kX);
    data.w1 = random_tensor(dtype, w1_dims, data.hidden, tensor_seed, kW1);
    data.w2 = random_tensor(dtype, w2_dims, data.ffn, tensor_seed, kW2);
    if (with_d_out) data.d_out = random_tensor(dtype, token_dims, 1, tensor_seed, kDOut);
  } catch (const std::bad_alloc&) {
    throw_world("{} with {} tokens does not fit the memory of this machine", where,
                data.num_tokens);
  } catch (const std::length_error&) {
    throw_world("{} with {} tokens does not fit the memory of this machine", where,
                data.num_tokens);
  }
  return data;
}

Case load_case(const std::string& path) {
  CaseFile file(path);
  Case data = load_sizes(file);
  if (file.has("tokens_per_rank")) {
    data.tokens_per_rank = load_tokens_per_rank(file, data.num_tokens);
  }
  data.topk_ids = read_topk_ids(file.get("topk_ids"), data.num_experts, path);
  const Tensor& weights = file.get("topk_weights");
  if (weights.dtype != DType::f32) {
    throw_invalid("tensor topk_weights of {} is {}; it must be F32", file.where(),
                  dtype_name(weights.dtype));
  }
  data.topk_weights = tensor_values<float>(weights);
  data.w1 = take_data(file, data, "w1");
  data.w2 = take_data(file, data, "w2");
  if (file.has("d_out")) data.d_out = take_data(file, data, "d_out");
  data.x = take_data(file, data, "x");
  return data;
}

TensorFile to_tensor_file(Case data) {
  check_dtype(data.dtype, "the dtype", "the case");
  check_sizes(data, "the case");
  const Dims token_dims = {data.num_tokens, data.hidden};
  const Dims choice_dims = {data.num_tokens, data.topk};
  TensorFile file;
  file.metadata = {{"uniep_format", "1"}, {"activation", "swiglu"}, {"numerics", "default"}};
  file.tensors["x"] = {data.dtype, token_dims, std::move(data.x)};
  file.tensors["topk_ids"] = make_tensor(DType::i32, choice_dims, data.topk_ids);
  file.tensors["topk_weights"] = make_tensor(DType::f32, choice_dims, data.topk_weights);
  file.tensors["w1"] = {
      data.dtype, {data.num_experts, 2 * data.ffn, data.hidden}, std::move(data.w1)};
  file.tensors["w2"] = {data.dtype, {data.num_experts, data.hidden, data.ffn}, std::move(data.w2)};
  if (data.d_out) file.tensors["d_out"] = {data.dtype, token_dims, std::move(*data.d_out)};
  if (!data.tokens_per_rank.empty()) {
    const auto num_ranks = static_cast<std::int64_t>(data.tokens_per_rank.size());
    file.tensors["tokens_per_rank"] = make_tensor(DType::i64, {num_ranks}, data.tokens_per_rank);
  }
  return file;
}

void save_case(const std::string& path, const Case& data) {
  write_tensor_file(path, to_tensor_file(data));
}

}  // namespace uniep
