// SPDX-License-Identifier: Apache-2.0
#include "base/error.hpp"

#include <cstdio>
#include <cstdlib>

namespace uniep {

void assert_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "uniep: internal error: '%s' does not hold at %s:%d; please report it\n",
               condition, file, line);
  std::abort();
}

}  // namespace uniep
