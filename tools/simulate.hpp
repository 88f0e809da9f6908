// SPDX-License-Identifier: Apache-2.0
// What the commands that predict share.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.hpp"
#include "simulate/hardware.hpp"
#include "simulate/load.hpp"
#include "simulate/score.hpp"

namespace uniep::tools {

struct HardwareOptions {
  std::string profile = "h200";
  std::int64_t ranks_per_gpu = 1;
};
void add_hardware_options(CLI::App& app, HardwareOptions& options);

// `profile` is a file, or the name of one that comes with the program.
[[nodiscard]] simulate::Hardware find_hardware(const std::string& profile);

// Sizes and routing of a step without its tensors, which may be larger than this machine.
struct Step {
  LayerSizes sizes;
  simulate::Topology topology;
  std::vector<std::int64_t> tokens_per_rank;
  std::vector<std::int32_t> topk_ids;
};
[[nodiscard]] Step build_step(const CaseOptions& options, int ranks, const HardwareOptions& where,
                              const simulate::Hardware& hardware);
[[nodiscard]] Step step_of(const Case& data, int ranks, const HardwareOptions& where,
                           const simulate::Hardware& hardware);

[[nodiscard]] nlohmann::json to_json(const simulate::Parts& parts);

}  // namespace uniep::tools
