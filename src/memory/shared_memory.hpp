// SPDX-License-Identifier: Apache-2.0
// Memory that several processes map. It has no name in any file system, so that a crash leaves
// nothing behind: it is gone with the last process that maps it.
#pragma once

#include <cstddef>

namespace uniep {

class SharedMemory {
 public:
  // Zero-filled, for this process and those it forks. Errors: world if the system refuses it.
  explicit SharedMemory(std::size_t bytes);
  // Of an open memory file; the descriptor may be closed afterwards.
  SharedMemory(int fd, std::size_t bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace uniep
