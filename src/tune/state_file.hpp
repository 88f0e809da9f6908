// SPDX-License-Identifier: Apache-2.0
// A small file of results that programs share: always whole (a new one takes the old one's name),
// changed by one process at a time, and never a reason to fail: what cannot be read, or is of
// another version or kind, is as good as absent and is replaced at the next update.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace uniep::tune {

// Gets a sentence; called at most once for each StateFile.
using Warn = std::function<void(const std::string&)>;

class StateFile {
 public:
  // The file is an object {KIND: VERSION, "entries": {…}}.
  StateFile(std::string path, std::string kind, int version, Warn warn);

  // The entries; none where there is no such file, or, with a warning, no valid one.
  [[nodiscard]] nlohmann::json read();

  // Changes the entries under a lock; false, with a warning, where another process holds it for
  // longer than two seconds or the file cannot be written.
  bool update(const std::function<void(nlohmann::json& entries)>& change);

  [[nodiscard]] const std::string& path() const { return path_; }
  void warn(const std::string& text);

 private:
  std::string path_, kind_;
  int version_;
  Warn warn_;
};

// $UNIEP_CACHE, or uniep in $XDG_CACHE_HOME or ~/.cache; empty where none of them is set.
[[nodiscard]] std::string state_folder();

}  // namespace uniep::tune
