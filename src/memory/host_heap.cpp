// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "memory/bootstrap.hpp"
#include "memory/symmetric_heap.hpp"

namespace uniep {
namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Of the whole mapping: control part, ranks, common part.
std::size_t total_bytes(const HeapSize& size) {
  std::size_t bytes = 0;
  if (size.bytes_per_rank > std::numeric_limits<std::size_t>::max() / 2 ||
      __builtin_mul_overflow(aligned(size.bytes_per_rank), static_cast<std::size_t>(size.num_ranks),
                             &bytes) ||
      __builtin_add_overflow(bytes, SymmetricHeap::kControlBytes, &bytes) ||
      __builtin_add_overflow(bytes, size.common_bytes, &bytes)) {
    throw_world("a symmetric heap of {} ranks with {} bytes each exceeds the address space",
                size.num_ranks, size.bytes_per_rank);
  }
  return bytes;
}

void require_available(std::size_t bytes) {
  if (const std::uint64_t available = available_bytes(); bytes > available) {
    throw_world("the symmetric heap needs {} bytes and {} are available; use fewer tokens or ranks",
                bytes, available);
  }
}

SharedMemory make_memory(const HeapSize& size, const std::function<void(std::byte*)>& fill,
                         Bootstrap* bootstrap) {
  const std::size_t bytes = total_bytes(size);
  if (bootstrap != nullptr) return bootstrap->share(bytes, fill);
  require_available(bytes);
  SharedMemory memory(bytes);
  fill(memory.data());
  return memory;
}

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(const HeapSize& size, const std::function<void(std::byte*)>& fill, Bootstrap* bootstrap)
      : num_ranks_(size.num_ranks),
        bytes_per_rank_(aligned(size.bytes_per_rank)),
        memory_(make_memory(size, fill, bootstrap)) {}

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] std::size_t bytes_per_rank() const override { return bytes_per_rank_; }
  [[nodiscard]] std::byte* control() const override { return memory_.data(); }
  [[nodiscard]] std::byte* common() const override { return part(num_ranks_); }
  [[nodiscard]] std::byte* map(int rank) const override {
    UNIEP_ASSERT(rank >= 0 && rank < num_ranks_);
    return part(rank);
  }

 private:
  [[nodiscard]] std::byte* part(int index) const {
    return memory_.data() + kControlBytes + static_cast<std::size_t>(index) * bytes_per_rank_;
  }

  int num_ranks_;
  std::size_t bytes_per_rank_;
  SharedMemory memory_;
};

}  // namespace

std::unique_ptr<SymmetricHeap> make_host_heap(const HeapSize& size,
                                              const std::function<void(std::byte*)>& fill,
                                              Bootstrap* bootstrap) {
  if (size.num_ranks < 1) throw_invalid("num_ranks is {}; it must be at least 1", size.num_ranks);
  return std::make_unique<HostHeap>(size, fill, bootstrap);
}

}  // namespace uniep
