// SPDX-License-Identifier: Apache-2.0
// What `uniep tune` stores and `--schedule auto` finds.
#pragma once

#include <optional>
#include <string>

#include "commands.hpp"
#include "tune/tuner.hpp"

namespace uniep::tools {

// Where --schedule auto looks: tuned.json in $UNIEP_CACHE, $XDG_CACHE_HOME/uniep or ~/.cache/uniep;
// nothing where none of these is set. Warnings go to standard error.
[[nodiscard]] std::optional<tune::StateFile> open_cache(const std::string& path = "");

// Of a step with these sizes and routing on this machine's backend.
[[nodiscard]] tune::Key key_of(const std::string& backend, const Case& data, int num_ranks);

// Replaces `auto` by what was tuned for this step, or by nothing, which is the default; says which:
// "given", "tuned" or "default". Never fails and never waits: whatever is wrong with the file ends
// in a warning and the default.
std::string resolve_auto(LayerOptions& options, const Case& data, int num_ranks);

}  // namespace uniep::tools
