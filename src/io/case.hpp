// SPDX-License-Identifier: Apache-2.0
// A case: the global input of one layer, for all ranks, rank-major, as it stands in a tensor file.
// Also the named shapes, and random cases made from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/routing.hpp"
#include "io/tensor_file.hpp"

namespace uniep {

struct Shape {
  std::string name;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t experts = 0;
  std::int64_t topk = 0;
  std::int64_t tokens = 0;  // default over all ranks; 0 where the user must give it
};

[[nodiscard]] std::span<const Shape> named_shapes();

// Throws invalid_argument for an unknown name and lists the known ones.
[[nodiscard]] const Shape& find_shape(std::string_view name);

// x, w1, w2 and d_out hold values of `dtype`, row-major.
struct Case {
  DType dtype = DType::bf16;  // bf16 or f32
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t num_experts = 0;
  std::int64_t topk = 0;
  std::vector<std::int64_t> tokens_per_rank;    // [R]; empty where the file leaves the split open
  std::vector<std::byte> x;                     // [num_tokens, hidden]
  std::vector<std::int32_t> topk_ids;           // [num_tokens, topk], -1 = masked
  std::vector<float> topk_weights;              // [num_tokens, topk], anything where masked
  std::vector<std::byte> w1;                    // [num_experts, 2*ffn, hidden], gate rows first
  std::vector<std::byte> w2;                    // [num_experts, hidden, ffn]
  std::optional<std::vector<std::byte>> d_out;  // [num_tokens, hidden]
};

// x and d_out ~ N(0, 1), w1 ~ N(0, 1/hidden), w2 ~ N(0, 1/ffn), rounded to `dtype`; the same
// values on every machine and for every rank count. shape.tokens is taken as it is, 0 included.
// Throws invalid_argument for sizes out of range, world for too little memory.
[[nodiscard]] Case make_case(const Shape& shape, DType dtype, const RoutingSpec& routing,
                             int num_ranks, double mask, std::uint64_t seed, bool with_d_out);

// Throws invalid_argument for tensors that are missing or disagree. Tensors of other names are
// ignored. Non-finite values are data: whoever hunts a bad step must be able to replay it.
[[nodiscard]] Case load_case(const std::string& path);

// The case as it stands in a file; save_case writes that.
[[nodiscard]] TensorFile to_tensor_file(Case data);
void save_case(const std::string& path, const Case& data);

}  // namespace uniep
