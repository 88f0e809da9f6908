// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace uniep {

// Element types of tensors. The layer computes on bf16 and f32; the others occur in files.
enum class DType { bf16, f32, f64, i32, i64 };

}  // namespace uniep
