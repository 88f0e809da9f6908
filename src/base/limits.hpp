// SPDX-License-Identifier: Apache-2.0
// Limits that several parts must agree on.
#pragma once

namespace uniep {

inline constexpr int kMaxTopk = 64;
inline constexpr int kMaxRanks = 1024;
// Ranks times workers: beyond, threads do little but take turns, and a run seems to hang.
inline constexpr int kMaxThreads = 4096;
inline constexpr int kMaxTraceCapacity = 1 << 24;  // records of a worker: 1 GiB

}  // namespace uniep
