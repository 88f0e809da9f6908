// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <cstdio>
#include <cstdlib>

namespace uniep {

Error::Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
Error::~Error() = default;

void assert_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "uniep: internal error: '%s' does not hold at %s:%d; please report it\n",
               condition, file, line);
  std::abort();
}

}  // namespace uniep
