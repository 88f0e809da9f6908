// SPDX-License-Identifier: Apache-2.0
// The text that a model learns from: bytes, the last of them held out, and what counting bytes and
// pairs of bytes alone would reach on those.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "train/config.hpp"

namespace uniep::train {

struct Text {
  std::vector<std::uint8_t> bytes;
  std::uint64_t hash = 0;

  // Predicted in training: [context, train_end); held out: [train_end, held_out_end).
  std::int64_t train_end = 0;
  std::int64_t held_out_end = 0;

  [[nodiscard]] std::span<const std::uint8_t> held_out() const {
    return std::span(bytes).subspan(count(train_end), count(held_out_end - train_end));
  }
};

// A tenth of the text is held out, but no more than this: evaluating is to stay a small part.
inline constexpr std::int64_t kMostHeldOut = std::int64_t{1} << 17;

// Errors: invalid_argument for a file that is absent or too short for the sizes, world for a
// failed read.
[[nodiscard]] Text load_text(const std::string& path, const Config& config);
[[nodiscard]] Text make_text(std::vector<std::uint8_t> bytes, const Config& config,
                             const std::string& name);

// First predicted byte of sequence `index` of step `step`: a function of these and the seed alone,
// so a resumed run and any number of ranks read the same.
[[nodiscard]] std::int64_t window_of(const Text& text, const Config& config, std::int64_t step,
                                     std::int64_t index);

// Empirical entropies of `bytes` in bits: of a byte, and of a byte given the one before. No model
// that looks at one byte only can be better than the second on the very bytes it was counted on.
[[nodiscard]] double unigram_entropy(std::span<const std::uint8_t> bytes);
[[nodiscard]] double order1_entropy(std::span<const std::uint8_t> bytes);

}  // namespace uniep::train
