// SPDX-License-Identifier: Apache-2.0
// Random tensors for timing: made faster than they could be copied to the GPU. A sequence of normal
// values whose length is prime, so that no two rows of a tensor are alike, is repeated.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/device_memory.hpp"
#include "uniep/dtype.hpp"

namespace uniep {

class RandomPattern {
 public:
  RandomPattern(DType dtype, std::uint64_t seed);  // bf16 or f32

  // N(0, scale²) values in `bytes` bytes of the dtype. Errors: world if the memory is not there.
  [[nodiscard]] cuda::DeviceArray<std::byte> make(std::int64_t bytes, float scale,
                                                  const char* what) const;

 private:
  DType dtype_;
  std::vector<float> values_;
};

}  // namespace uniep
