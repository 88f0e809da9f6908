// SPDX-License-Identifier: Apache-2.0
#include "layer/cuda/random_pattern.hpp"

#include <algorithm>
#include <cstring>

#include "base/rng.hpp"
#include "uniep/bf16.hpp"

namespace uniep {
namespace {

constexpr std::int64_t kPeriod = 4194301;  // the largest prime below 2^22

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    throw_world("random values cannot be made on the GPU: {}", cudaGetErrorString(error));
  }
}

}  // namespace

RandomPattern::RandomPattern(DType dtype, std::uint64_t seed)
    : dtype_(dtype), values_(static_cast<std::size_t>(kPeriod)) {
  constexpr std::uint64_t kStream = 17;
  Rng rng(seed, kStream);
  for (float& value : values_) value = rng.normal();
}

cuda::DeviceArray<std::byte> RandomPattern::make(std::int64_t bytes, float scale,
                                                 const char* what) const {
  cuda::DeviceArray<std::byte> array(bytes, what);
  const std::int64_t width = dtype_ == DType::bf16 ? 2 : 4;
  std::int64_t filled = std::min(bytes, kPeriod * width);
  std::vector<std::byte> first(static_cast<std::size_t>(filled));
  for (std::int64_t i = 0; i < filled / width; ++i) {
    const float value = values_[static_cast<std::size_t>(i)] * scale;
    const Bf16 narrow = to_bf16(value);
    std::memcpy(first.data() + i * width,
                width == 2 ? static_cast<const void*>(&narrow) : static_cast<const void*>(&value),
                static_cast<std::size_t>(width));
  }
  if (filled == 0) return array;
  check_cuda(cudaMemcpy(array.get(), first.data(), first.size(), cudaMemcpyHostToDevice));
  // Whole periods, so that each copy goes on where the one before it ended.
  while (filled < bytes) {
    const std::int64_t count = std::min(filled, bytes - filled);
    check_cuda(cudaMemcpy(array.get() + filled, array.get(), static_cast<std::size_t>(count),
                          cudaMemcpyDeviceToDevice));
    filled += count;
  }
  check_cuda(cudaDeviceSynchronize());
  return array;
}

}  // namespace uniep
