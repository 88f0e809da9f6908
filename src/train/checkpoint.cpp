// SPDX-License-Identifier: Apache-2.0
#include "train/checkpoint.hpp"

#include <algorithm>
#include <charconv>

#include "base/error.hpp"
#include "io/tensor_file.hpp"

namespace uniep::train {
namespace {

constexpr const char* kFormat = "uniep_train_format";

// Calls visit(name, shape, floats) for each tensor of a checkpoint; State may be const.
template <typename State, typename Visitor>
void visit_tensors(State& state, Visitor visit) {
  const auto visit_trained = [&](const std::string& name, const std::vector<std::int64_t>& shape,
                                 auto& trained, std::size_t offset, std::size_t size) {
    visit(name, shape, std::span(trained.value).subspan(offset, size));
    visit(fmt::format("adam_m.{}", name), shape, std::span(trained.m).subspan(offset, size));
    visit(fmt::format("adam_v.{}", name), shape, std::span(trained.v).subspan(offset, size));
  };
  const Config& c = state.config;
  for (const DenseTensor& tensor : dense_tensors(c)) {
    visit_trained(tensor.name, tensor.shape, state.dense, count(tensor.offset), count(tensor.size));
  }
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    auto& w1 = state.w1[count(layer)];
    auto& w2 = state.w2[count(layer)];
    visit_trained(fmt::format("layer{}.w1", layer), {c.experts, 2 * c.ffn, c.hidden}, w1, 0,
                  w1.value.size());
    visit_trained(fmt::format("layer{}.w2", layer), {c.experts, c.hidden, c.ffn}, w2, 0,
                  w2.value.size());
  }
}

std::uint64_t read_hash(const std::map<std::string, std::string>& metadata, const std::string& key,
                        const std::string& where) {
  const auto found = metadata.find(key);
  const std::string text = found == metadata.end() ? "" : found->second;
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (text.size() != 16 || error != std::errc{} || end != text.data() + text.size()) {
    throw_invalid("{} in {} is {}; it must be 16 hexadecimal digits", key, where, quote(text));
  }
  return value;
}

}  // namespace

void save_checkpoint(const std::string& path, const ModelState& state, const Text& text) {
  TensorFile file;
  write_config(state.config, file.metadata);
  file.metadata.emplace(kFormat, "1");
  file.metadata["step"] = fmt::format("{}", state.step);
  file.metadata["loss_hash"] = fmt::format("{:016x}", state.loss_hash);
  file.metadata["text_hash"] = fmt::format("{:016x}", text.hash);
  visit_tensors(state, [&file](const std::string& name, const std::vector<std::int64_t>& shape,
                               std::span<const float> values) {
    const auto bytes = std::as_bytes(values);
    file.tensors[name] = {DType::f32, shape, {bytes.begin(), bytes.end()}};
  });
  write_tensor_file(path, file);
}

ModelState load_checkpoint(const std::string& path, std::uint64_t& text_hash) {
  const TensorFile file = read_tensor_file(path);
  const std::string where = fmt::format("checkpoint {}", quote(path));
  const auto format = file.metadata.find(kFormat);
  if (format == file.metadata.end() || format->second != "1") {
    throw_invalid("{} is no checkpoint of uniep train: its metadata has no {} of 1", where,
                  kFormat);
  }
  ModelState state = make_model_state(read_config(file.metadata, where));
  state.step = read_number(file.metadata, "step", where);
  if (state.step < 0) throw_invalid("step in {} is {}; it must be 0 or more", where, state.step);
  state.loss_hash = read_hash(file.metadata, "loss_hash", where);
  text_hash = read_hash(file.metadata, "text_hash", where);
  visit_tensors(state, [&](const std::string& name, const std::vector<std::int64_t>& shape,
                           std::span<float> values) {
    const auto found = file.tensors.find(name);
    if (found == file.tensors.end()) throw_invalid("{} has no tensor {}", where, name);
    const Tensor& tensor = found->second;
    if (tensor.dtype != DType::f32 || tensor.shape != shape) {
      throw_invalid("{} in {} is {} {}; its sizes need F32 {}", name, where,
                    dtype_name(tensor.dtype), shape_text(tensor.shape), shape_text(shape));
    }
    const auto loaded = tensor_values<float>(tensor);
    std::copy(loaded.begin(), loaded.end(), values.begin());
  });
  return state;
}

}  // namespace uniep::train
