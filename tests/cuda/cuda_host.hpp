// SPDX-License-Identifier: Apache-2.0
// The host's side of the GPU test programs: checked calls, buffers, and PASS or FAIL lines.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace uniep::cuda_test {

#define UNIEP_CUDA_CHECK(call)                                                         \
  do {                                                                                 \
    const cudaError_t error_ = (call);                                                 \
    if (error_ != cudaSuccess) {                                                       \
      std::printf("FAIL %s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(3);                                                                    \
    }                                                                                  \
  } while (false)

template <typename T>
class Buffer {
 public:
  explicit Buffer(std::int64_t count) : count_(count) {
    UNIEP_CUDA_CHECK(
        cudaMalloc(&data_, static_cast<std::size_t>(count > 0 ? count : 1) * sizeof(T)));
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<std::int64_t>(values.size())) {
    UNIEP_CUDA_CHECK(
        cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  [[nodiscard]] T* get() const { return data_; }
  [[nodiscard]] std::int64_t count() const { return count_; }
  // Every byte 0xFF: a NaN as bf16 and as fp32.
  void poison() const {
    UNIEP_CUDA_CHECK(cudaMemset(data_, 0xFF, static_cast<std::size_t>(count_) * sizeof(T)));
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> values(static_cast<std::size_t>(count_));
    UNIEP_CUDA_CHECK(
        cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::int64_t count_;
};

// Counts checks; finish() prints the line that ends a program and gives its exit code.
class Report {
 public:
  void check(bool passed, const std::string& what) {
    std::printf("%s %s\n", passed ? "PASS" : "FAIL", what.c_str());
    std::fflush(stdout);
    (passed ? passed_ : failed_)++;
  }
  [[nodiscard]] int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ == 0 ? 0 : 1;
  }

 private:
  int passed_ = 0;
  int failed_ = 0;
};

}  // namespace uniep::cuda_test
