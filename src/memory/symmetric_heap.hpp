// SPDX-License-Identifier: Apache-2.0
// Symmetric memory: every rank has the same number of bytes, and any rank can map any other's.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace uniep {

class Bootstrap;

struct HeapSize {
  int num_ranks = 1;
  std::size_t bytes_per_rank = 0;
  std::size_t common_bytes = 0;  // beside the ranks' parts
};

class SymmetricHeap {
 public:
  static constexpr std::size_t kControlBytes = 4096;
  virtual ~SymmetricHeap() = default;
  [[nodiscard]] virtual int num_ranks() const = 0;
  [[nodiscard]] virtual std::size_t bytes_per_rank() const = 0;
  // kControlBytes that all ranks share, 64-byte aligned: the group's state.
  [[nodiscard]] virtual std::byte* control() const = 0;
  // common_bytes that all ranks share, 64-byte aligned.
  [[nodiscard]] virtual std::byte* common() const = 0;
  // Start of `rank`'s part as this process sees it, 64-byte aligned.
  [[nodiscard]] virtual std::byte* map(int rank) const = 0;
};

// Provider `host`: one shared mapping without a name, zero-filled but for the control part, which
// `fill` is called on before any other rank can see it. Ranks are threads of this process or
// processes forked after this call; with a bootstrap they are the job's processes, and the call is
// collective. Errors: world, with the bytes, if the memory is not there.
[[nodiscard]] std::unique_ptr<SymmetricHeap> make_host_heap(
    const HeapSize& size, const std::function<void(std::byte*)>& fill = [](std::byte*) {},
    Bootstrap* bootstrap = nullptr);

}  // namespace uniep
