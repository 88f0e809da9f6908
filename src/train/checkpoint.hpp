// SPDX-License-Identifier: Apache-2.0
// A checkpoint: a safetensors file with the weights by name, the two moments of each as
// "adam_m.NAME" and "adam_v.NAME", and as metadata the sizes, the step, the hash of the losses so
// far and the text. The place in the text follows from seed and step.
#pragma once

#include <string>

#include "train/model_state.hpp"
#include "train/text.hpp"

namespace uniep::train {

// The file appears under its name complete or not at all. Errors: those of write_tensor_file.
void save_checkpoint(const std::string& path, const ModelState& state, const Text& text);

// Errors: invalid_argument for a file that is absent, malformed, no checkpoint, or lacks a tensor,
// world for a failed read.
[[nodiscard]] ModelState load_checkpoint(const std::string& path, std::uint64_t& text_hash);

}  // namespace uniep::train
