// SPDX-License-Identifier: Apache-2.0
// Throwing uniep::Error with a formatted sentence. Our own bugs are no Error: they stop at
// UNIEP_ASSERT.
#pragma once

#include <fmt/format.h>

#include <utility>

#include "uniep/error.hpp"

namespace uniep {

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
