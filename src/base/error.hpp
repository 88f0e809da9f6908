// SPDX-License-Identifier: Apache-2.0
// The two kinds of failure a caller can see. Our own bugs are neither: they stop at UNIEP_ASSERT.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace uniep {

// invalid_argument: the caller's mistake; the text names the value and what would be valid (exit 2).
// world: memory, a peer, a wait that expired, or a capability this machine lacks (exit 3).
enum class ErrorCode { invalid_argument, world };

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

template <typename... Args>
[[noreturn]] void throw_invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::invalid_argument, fmt::format(format, std::forward<Args>(args)...));
}

template <typename... Args>
[[noreturn]] void throw_world(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(ErrorCode::world, fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void assert_failed(const char* condition, const char* file, int line);

}  // namespace uniep

// Checks an invariant of uniep itself, in release builds too.
#define UNIEP_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::uniep::assert_failed(#condition, __FILE__, __LINE__))
