// SPDX-License-Identifier: Apache-2.0
// The named shapes, and random cases made from them. Reading and writing is in uniep/case.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/routing.hpp"
#include "io/tensor_file.hpp"
#include "uniep/case.hpp"

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

// x and d_out ~ N(0, 1), w1 ~ N(0, 1/hidden), w2 ~ N(0, 1/ffn), rounded to `dtype`; the same
// values on every machine and for every rank count. shape.tokens is taken as it is, 0 included.
// Throws invalid_argument for sizes out of range, world for too little memory.
[[nodiscard]] Case make_case(const Shape& shape, DType dtype, const RoutingSpec& routing,
                             int num_ranks, double mask, std::uint64_t seed, bool with_d_out);

}  // namespace uniep
