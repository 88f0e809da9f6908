// SPDX-License-Identifier: Apache-2.0
// Tensor files in the safetensors format: a length, a JSON header, then the tensors' bytes.
// Reading is strict: whatever the header leaves unclear is refused with a sentence, because a file
// that is read wrongly looks like a numeric bug. Data is copied out, so alignment never matters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "uniep/dtype.hpp"

namespace uniep {

[[nodiscard]] std::int64_t dtype_bytes(DType dtype);
[[nodiscard]] std::string_view dtype_name(DType dtype);  // as in files: "BF16", "F32", …

struct Tensor {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // row-major; empty for a scalar
  std::vector<std::byte> data;      // exactly the bytes that dtype and shape need
};

struct TensorFile {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

// Bytes of a tensor, or nothing where a dimension is negative or the product (taken over the
// dimensions other than 0, so that their order does not matter) does not fit 64 bits.
[[nodiscard]] std::optional<std::int64_t> tensor_bytes(DType dtype,
                                                       std::span<const std::int64_t> shape);

// "[3, 4]"
[[nodiscard]] std::string shape_text(std::span<const std::int64_t> shape);

// Quoted for an error text: control characters escaped, long text cut.
[[nodiscard]] std::string quote(std::string_view text);

// Throws invalid_argument for a file that is absent, not a regular file or not well formed, world
// for a failed read or too little memory.
[[nodiscard]] TensorFile read_tensor_file(const std::string& path);

// The file appears under its name complete or not at all: it is written beside it, synced and
// renamed; the temporary file is removed on failure. Throws invalid_argument where the path cannot
// be written or `file` contradicts itself, world for a full disk and the like.
void write_tensor_file(const std::string& path, const TensorFile& file);

// Values of a tensor as T, whose size must be that of the tensor's dtype, and the way back.
template <typename T>
[[nodiscard]] std::vector<T> tensor_values(const Tensor& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), tensor.data.data(), values.size() * sizeof(T));
  return values;
}

template <typename T>
[[nodiscard]] Tensor make_tensor(DType dtype, std::vector<std::int64_t> shape,
                                 const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return Tensor{dtype, std::move(shape), std::vector<std::byte>(bytes.begin(), bytes.end())};
}

}  // namespace uniep
