// SPDX-License-Identifier: Apache-2.0
#include "train/model_state.hpp"

#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "base/rng.hpp"

namespace uniep::train {
namespace {

// N(0, scale²), each tensor from a stream of its own.
void fill_normal(std::span<float> values, double scale, std::int64_t seed, std::uint64_t stream) {
  Rng rng(static_cast<std::uint64_t>(seed), stream);
  for (float& value : values) value = rng.normal() * static_cast<float>(scale);
}

Trained make_trained(std::int64_t size) {
  return {std::vector<float>(count(size)), std::vector<float>(count(size)),
          std::vector<float>(count(size))};
}

}  // namespace

std::vector<DenseTensor> dense_tensors(const Config& config) {
  std::vector<DenseTensor> tensors;
  std::int64_t offset = 0;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape) {
    std::int64_t size = 1;
    for (const std::int64_t n : shape) size *= n;
    const bool decays = shape.size() > 1;
    tensors.push_back({std::move(name), std::move(shape), offset, size, decays});
    offset += size;
  };
  add("embedding", {kBytes, kEmbeddingWidth});
  add("mix", {config.hidden, config.context * kEmbeddingWidth});
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    add(fmt::format("layer{}.norm", layer), {config.hidden});
    add(fmt::format("layer{}.router", layer), {config.experts, config.hidden});
  }
  add("final_norm", {config.hidden});
  add("head", {kBytes, config.hidden});
  return tensors;
}

std::int64_t dense_size(const Config& config) {
  const auto tensors = dense_tensors(config);
  return tensors.back().offset + tensors.back().size;
}

template <typename T>
Dense<T> dense_view(const Config& config, std::span<T> flat) {
  std::size_t next = 0;
  const auto take = [&](std::int64_t size) {
    const auto part = flat.subspan(next, count(size));
    next += count(size);
    return part;
  };
  Dense<T> dense;
  dense.embedding = take(kBytes * kEmbeddingWidth);
  dense.mix = take(config.hidden * config.context * kEmbeddingWidth);
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    dense.norm.push_back(take(config.hidden));
    dense.router.push_back(take(config.experts * config.hidden));
  }
  dense.final_norm = take(config.hidden);
  dense.head = take(kBytes * config.hidden);
  UNIEP_ASSERT(next == flat.size());
  return dense;
}

template Dense<float> dense_view(const Config&, std::span<float>);
template Dense<const float> dense_view(const Config&, std::span<const float>);

ModelState make_model_state(const Config& config) {
  validate(config);
  const std::int64_t matrix = config.hidden * config.ffn;
  require_memory(
      12.0 * static_cast<double>(dense_size(config) + 3 * config.layers * config.experts * matrix),
      "the model with its moments");
  ModelState state;
  state.config = config;
  state.dense = make_trained(dense_size(config));
  std::uint64_t stream = 0;
  for (const DenseTensor& tensor : dense_tensors(config)) {
    const auto values =
        std::span(state.dense.value).subspan(count(tensor.offset), count(tensor.size));
    if (!tensor.decays) {
      for (float& value : values) value = 1.0F;  // a gain
    } else {
      const auto fan_in = static_cast<double>(tensor.shape.back());
      const double scale = tensor.name == "embedding" ? 1.0 : 1.0 / std::sqrt(fan_in);
      // A head near zero begins with all bytes equally likely.
      fill_normal(values, tensor.name == "head" ? 0.1 * scale : scale, config.seed, stream);
    }
    ++stream;
  }
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    state.w1.push_back(make_trained(config.experts * 2 * matrix));
    state.w2.push_back(make_trained(config.experts * matrix));
    fill_normal(state.w1.back().value, 1.0 / std::sqrt(static_cast<double>(config.hidden)),
                config.seed, stream++);
    fill_normal(state.w2.back().value, 1.0 / std::sqrt(static_cast<double>(config.ffn)),
                config.seed, stream++);
  }
  return state;
}

}  // namespace uniep::train
