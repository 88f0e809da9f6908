// SPDX-License-Identifier: Apache-2.0
#include "train/config.hpp"

#include <array>
#include <charconv>

#include "base/error.hpp"
#include "base/limits.hpp"
#include "io/tensor_file.hpp"

namespace uniep::train {
namespace {

constexpr std::array<ConfigField, 9> kFields = {{
    {"layers", &Config::layers, 1, 64, 1, "MoE layers"},
    {"hidden", &Config::hidden, 8, 4096, 8, "model width H, a multiple of 8"},
    {"ffn", &Config::ffn, 8, 16384, 8, "inner width F of an expert, a multiple of 8"},
    {"experts", &Config::experts, 1, 1024, 1, "experts E of a layer, over all ranks"},
    {"topk", &Config::topk, 1, kMaxTopk, 1, "choices of a token"},
    {"context", &Config::context, 1, 256, 1, "bytes that a prediction sees"},
    {"sequence", &Config::sequence, 1, 4096, 1, "predictions in a sequence"},
    {"batch", &Config::batch, 1, 4096, 1, "sequences in a step, over all ranks"},
    {"seed", &Config::seed, 0, std::int64_t{1} << 62, 1, "seed of weights and of the batches"},
}};

template <typename T>
T parse(const std::map<std::string, std::string>& metadata, const std::string& key,
        const std::string& where) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) throw_invalid("{} has no {}; it is no checkpoint", where, key);
  const std::string& text = found->second;
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw_invalid("{} in {} is {}; it must be a number", key, where, quote(text));
  }
  return value;
}

}  // namespace

std::span<const ConfigField> config_fields() { return kFields; }

void validate(const Config& config) {
  for (const ConfigField& field : kFields) {
    const std::int64_t value = config.*field.value;
    if (value < field.low || value > field.high || value % field.multiple != 0) {
      throw_invalid("{} is {}; it must be {} from {} to {}", field.name, value,
                    field.multiple > 1 ? fmt::format("a multiple of {}", field.multiple)
                                       : std::string("a whole number"),
                    field.low, field.high);
    }
  }
  if (config.topk > config.experts) {
    throw_invalid("topk is {}; with {} experts it must be 1 to {}", config.topk, config.experts,
                  config.experts);
  }
  const bool rate_is_valid = config.learning_rate > 0 && config.learning_rate <= 1;  // no NaN
  if (!rate_is_valid) {
    throw_invalid("the learning rate is {}; it must be above 0 and at most 1",
                  config.learning_rate);
  }
}

void write_config(const Config& config, std::map<std::string, std::string>& metadata) {
  for (const ConfigField& field : kFields) {
    metadata[field.name] = fmt::format("{}", config.*field.value);
  }
  metadata["learning_rate"] = fmt::format("{}", config.learning_rate);  // shortest that comes back
}

Config read_config(const std::map<std::string, std::string>& metadata, const std::string& where) {
  Config config;
  for (const ConfigField& field : kFields) {
    config.*field.value = read_number(metadata, field.name, where);
  }
  config.learning_rate = parse<double>(metadata, "learning_rate", where);
  validate(config);
  return config;
}

std::int64_t read_number(const std::map<std::string, std::string>& metadata, const std::string& key,
                         const std::string& where) {
  return parse<std::int64_t>(metadata, key, where);
}

}  // namespace uniep::train
