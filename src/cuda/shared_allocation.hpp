// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/descriptor.hpp"

namespace uniep::cuda {

// GPU memory that processes of one machine can map into each other: physical memory of one GPU,
// behind a descriptor, at an address of this process. It is given back when all processes have
// unmapped it or ended, in whatever order and way.
class SharedAllocation {
 public:
  // New memory of the current GPU, of at least `bytes`, as zeros. Errors: world if it is not there.
  explicit SharedAllocation(std::int64_t bytes);
  // The memory behind another process's share(), which was made for the same number of bytes.
  // Errors: world if it cannot be reached from the current GPU.
  SharedAllocation(std::int64_t bytes, const Descriptor& descriptor);
  SharedAllocation(SharedAllocation&& other) noexcept;
  SharedAllocation& operator=(SharedAllocation&&) = delete;
  ~SharedAllocation();

  [[nodiscard]] std::byte* get() const;
  // For another process, by way of a Unix socket. Errors: world.
  [[nodiscard]] Descriptor share() const;

 private:
  void map();

  std::uint64_t address_ = 0;
  std::uint64_t handle_ = 0;
  std::size_t bytes_ = 0;  // mapped
};

}  // namespace uniep::cuda
