// SPDX-License-Identifier: Apache-2.0
#include "uniep/version.hpp"

namespace uniep {

const char* library_version() noexcept { return UNIEP_VERSION; }

}  // namespace uniep
