// SPDX-License-Identifier: Apache-2.0
#include "memory/shared_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.hpp"

namespace uniep {
namespace {

std::byte* map(std::size_t bytes, int flags, int fd) {
  void* mapping = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  if (mapping == MAP_FAILED) {
    throw_world("the system refused {} bytes of shared memory: {}", bytes, std::strerror(errno));
  }
  return static_cast<std::byte*>(mapping);
}

}  // namespace

SharedMemory::SharedMemory(std::size_t bytes)
    : data_(map(std::max<std::size_t>(bytes, 1), MAP_ANONYMOUS, -1)),
      bytes_(std::max<std::size_t>(bytes, 1)) {}

SharedMemory::SharedMemory(int fd, std::size_t bytes) : data_(map(bytes, 0, fd)), bytes_(bytes) {}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

}  // namespace uniep
