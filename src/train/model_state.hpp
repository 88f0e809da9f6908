// SPDX-License-Identifier: Apache-2.0
// All that a training run carries from step to step: the weights with their AdamW moments, where it
// stands, and the hash of its losses so far.
//
// Everything but the experts ("dense") is one flat array, since gradients are summed and updated
// by slices of it; the experts' weights are one array a layer, of which a rank updates its part.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/hash.hpp"
#include "train/config.hpp"

namespace uniep::train {

struct Trained {
  std::vector<float> value, m, v;  // m, v: first and second moment of AdamW
};

struct ModelState {
  Config config;
  Trained dense;
  std::vector<Trained> w1;  // a layer: [E, 2F, H], gate rows first
  std::vector<Trained> w2;  // a layer: [E, H, F]
  std::int64_t step = 0;    // steps done; it also says where in the text the next one reads
  std::uint64_t loss_hash = fnv1a({});
};

// Weights from the seed, moments zero. Errors: world for missing memory.
[[nodiscard]] ModelState make_model_state(const Config& config);

// One tensor of the dense array.
struct DenseTensor {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t offset = 0;
  std::int64_t size = 0;
  bool decays = true;  // weight decay: not for gains
};
// In the order of the array.
[[nodiscard]] std::vector<DenseTensor> dense_tensors(const Config& config);
[[nodiscard]] std::int64_t dense_size(const Config& config);

// The dense array, or a gradient of it, by name.
template <typename T>
struct Dense {
  std::span<T> embedding;            // [256, kEmbeddingWidth]
  std::span<T> mix;                  // [H, context * kEmbeddingWidth]
  std::vector<std::span<T>> norm;    // a layer: [H]
  std::vector<std::span<T>> router;  // a layer: [E, H]
  std::span<T> final_norm;           // [H]
  std::span<T> head;                 // [256, H]
};
template <typename T>
[[nodiscard]] Dense<T> dense_view(const Config& config, std::span<T> flat);

extern template Dense<float> dense_view(const Config&, std::span<float>);
extern template Dense<const float> dense_view(const Config&, std::span<const float>);

}  // namespace uniep::train
