// SPDX-License-Identifier: Apache-2.0
// The two kinds of failure a caller can see.
#pragma once

#include <stdexcept>
#include <string>

#include "uniep/export.h"

namespace uniep {

// invalid_argument: the caller's mistake; the text names the value and what would be valid (exit
// 2). world: memory, a peer, a wait that expired, or a capability this machine lacks (exit 3).
enum class ErrorCode { invalid_argument, world };

class UNIEP_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text);
  ~Error() override;
  Error(const Error&) = default;
  Error& operator=(const Error&) = default;

  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace uniep
