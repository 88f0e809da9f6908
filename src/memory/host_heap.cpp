// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <cstdint>
#include <limits>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "memory/symmetric_heap.hpp"

namespace uniep {
namespace {

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(int num_ranks, std::size_t bytes_per_rank)
      : num_ranks_(num_ranks), bytes_per_rank_((bytes_per_rank + 63) / 64 * 64) {
    if (bytes_per_rank > std::numeric_limits<std::size_t>::max() / 2 ||
        __builtin_mul_overflow(bytes_per_rank_, static_cast<std::size_t>(num_ranks), &bytes_) ||
        __builtin_add_overflow(bytes_, kControlBytes, &bytes_)) {
      throw_world("a symmetric heap of {} ranks with {} bytes each exceeds the address space",
                  num_ranks, bytes_per_rank);
    }
    if (const std::uint64_t available = available_bytes(); bytes_ > available) {
      throw_world(
          "the symmetric heap needs {} bytes and {} are available; use fewer tokens or ranks",
          bytes_, available);
    }
    void* mapping =
        ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapping == MAP_FAILED) {
      throw_world("the system refused {} bytes for the symmetric heap", bytes_);
    }
    base_ = static_cast<std::byte*>(mapping);
  }
  ~HostHeap() override { ::munmap(base_, bytes_); }
  HostHeap(const HostHeap&) = delete;
  HostHeap& operator=(const HostHeap&) = delete;

  [[nodiscard]] int num_ranks() const override { return num_ranks_; }
  [[nodiscard]] std::size_t bytes_per_rank() const override { return bytes_per_rank_; }
  [[nodiscard]] std::byte* control() const override { return base_; }
  [[nodiscard]] std::byte* map(int rank) const override {
    UNIEP_ASSERT(rank >= 0 && rank < num_ranks_);
    return base_ + kControlBytes + static_cast<std::size_t>(rank) * bytes_per_rank_;
  }

 private:
  int num_ranks_;
  std::size_t bytes_per_rank_;
  std::size_t bytes_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace

std::unique_ptr<SymmetricHeap> make_host_heap(int num_ranks, std::size_t bytes_per_rank) {
  if (num_ranks < 1) throw_invalid("num_ranks is {}; it must be at least 1", num_ranks);
  return std::make_unique<HostHeap>(num_ranks, bytes_per_rank);
}

}  // namespace uniep
