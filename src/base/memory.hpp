// SPDX-License-Identifier: Apache-2.0
// Memory that is there, asked before it is taken: a Linux system hands out more than it has and
// ends a process that uses it, so a failed allocation alone would not be noticed in time.
#pragma once

#include <cstdint>
#include <string>

namespace uniep {

// Bytes that this process may still take: what the system has available, and less where a control
// group or a limit on the address space says so. The largest value where nothing says anything.
[[nodiscard]] std::uint64_t available_bytes();

// "1.5 GiB"
[[nodiscard]] std::string bytes_text(double bytes);

// Errors: world, naming both amounts, where `what` needs more bytes than are available.
void require_memory(double bytes, const std::string& what);

}  // namespace uniep
