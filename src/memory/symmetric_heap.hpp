// SPDX-License-Identifier: Apache-2.0
// Symmetric memory: every rank has the same number of bytes, and any rank can map any other's.
#pragma once

#include <cstddef>
#include <memory>

namespace uniep {

class SymmetricHeap {
 public:
  static constexpr std::size_t kControlBytes = 4096;
  virtual ~SymmetricHeap() = default;
  [[nodiscard]] virtual int num_ranks() const = 0;
  [[nodiscard]] virtual std::size_t bytes_per_rank() const = 0;
  // kControlBytes that all ranks share, zero-filled, 64-byte aligned: the group's state.
  [[nodiscard]] virtual std::byte* control() const = 0;
  // Start of `rank`'s part as this process sees it, 64-byte aligned.
  [[nodiscard]] virtual std::byte* map(int rank) const = 0;
};

// Provider `host`, ranks as threads of one process or as processes forked after this call: one
// anonymous shared mapping, zero-filled. It has no name, so nothing can be left behind.
// Errors: world, with the bytes, if the memory is not there.
[[nodiscard]] std::unique_ptr<SymmetricHeap> make_host_heap(int num_ranks,
                                                            std::size_t bytes_per_rank);

}  // namespace uniep
