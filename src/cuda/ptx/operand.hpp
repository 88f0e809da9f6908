// SPDX-License-Identifier: Apache-2.0
// How a matrix operand lies in shared memory: in boxes of 64 rows of 128 bytes, swizzled. For host
// and device.
#pragma once

namespace uniep::cuda::ptx {

enum class Major { k, mn };  // which index is contiguous

inline constexpr int kBoxBytes = 8192;

}  // namespace uniep::cuda::ptx
