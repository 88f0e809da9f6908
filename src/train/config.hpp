// SPDX-License-Identifier: Apache-2.0
// Sizes of the model and of its batches, and what else decides the bits of a training run. Ranks
// and schedule are not here: they decide none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>

namespace uniep::train {

inline constexpr std::int64_t kBytes = 256;          // the vocabulary
inline constexpr std::int64_t kEmbeddingWidth = 32;  // of one byte
inline constexpr double kBalanceWeight = 0.01;       // of the load-balancing loss

struct Config {
  std::int64_t layers = 2;     // MoE layers
  std::int64_t hidden = 96;    // model width H
  std::int64_t ffn = 96;       // inner width F of an expert
  std::int64_t experts = 8;    // E
  std::int64_t topk = 2;       // k
  std::int64_t context = 8;    // bytes seen by a prediction
  std::int64_t sequence = 64;  // predictions in a sequence, which is also the chunk of gradients
  std::int64_t batch = 32;     // sequences in a step, over all ranks
  std::int64_t seed = 1;
  double learning_rate = 1e-2;

  friend bool operator==(const Config&, const Config&) = default;
};

struct ConfigField {
  const char* name;
  std::int64_t Config::*value;
  std::int64_t low, high;
  std::int64_t multiple;
  const char* help;
};

// All whole-numbered fields: what options, checks and checkpoints go through.
[[nodiscard]] std::span<const ConfigField> config_fields();

// Errors: invalid_argument, naming the field, its value and what is valid.
void validate(const Config& config);

// As key and value for a checkpoint, and the way back. Errors: invalid_argument for a key that is
// missing or no number; `where` names the file in the text.
void write_config(const Config& config, std::map<std::string, std::string>& metadata);
[[nodiscard]] Config read_config(const std::map<std::string, std::string>& metadata,
                                 const std::string& where);

// The entry of a checkpoint's metadata as a number. Errors: invalid_argument.
[[nodiscard]] std::int64_t read_number(const std::map<std::string, std::string>& metadata,
                                       const std::string& key, const std::string& where);

[[nodiscard]] constexpr std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

}  // namespace uniep::train
