// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.hpp"

namespace uniep::cuda {

// An array in this GPU's memory, uninitialised.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  // Errors: world with the bytes if they are not there.
  DeviceArray(std::int64_t count, const char* what) : count_(count) {
    if (count <= 0) return;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (const cudaError_t error = cudaMalloc(&data_, bytes); error != cudaSuccess) {
      data_ = nullptr;
      throw_world("{} bytes of GPU memory for {} are not there: {}", bytes, what,
                  cudaGetErrorString(error));
    }
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] std::int64_t count() const { return count_; }

 private:
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

// Hands out aligned pieces of a block of memory that is not there yet.
class Pieces {
 public:
  static constexpr std::int64_t kAlignment = 256;  // bytes
  explicit Pieces(std::int64_t start) : next_(start) {}
  std::int64_t take(std::int64_t count, std::int64_t element_bytes) {
    const std::int64_t piece = next_;
    next_ += (count * element_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  [[nodiscard]] std::int64_t bytes() const { return next_; }

 private:
  std::int64_t next_;
};

}  // namespace uniep::cuda
