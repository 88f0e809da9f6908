// SPDX-License-Identifier: Apache-2.0
// Limits that several parts must agree on.
#pragma once

namespace uniep {

inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxRanks = 1024;

}  // namespace uniep
