// SPDX-License-Identifier: Apache-2.0
// Symmetric memory for device code: every rank has a part of the same size and layout, and a kernel
// reaches any rank's part by its base pointer. Provider `cuda`: virtual ranks have the parts of one
// allocation on one GPU; ranks in processes of their own, on one GPU or many, map each other's.
//
// Signals are 64-bit epochs, generation << 32 | operation, that only grow. Epochs live in device
// memory and the kernels advance them, so that a replayed CUDA graph is a new operation.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "cuda/shared_allocation.hpp"

namespace uniep::cuda {

inline constexpr int kMaxDeviceRanks = 16;

// What a kernel waited for; the host has the words.
enum class WaitStage : std::int32_t {
  plan_blocks,
  plan_counts,
  plan_order,
  dispatch_consumed,
  dispatch_tokens,
  dispatch_rows,
  dispatch_end,
  gemm1_rows,
  combine_rows,
  combine_end,
};

struct WaitReport {
  std::int32_t rank;
  std::int32_t stage;  // WaitStage
  std::int32_t peer;
  std::int32_t block;  // of the peer; -1 where the peer signals as a whole
  std::uint64_t expected;
  std::uint64_t seen;
  std::uint64_t waited_ns;
};

// First in every rank's part.
struct RankControl {
  // The last completed operation. Written by block 0 of the owner's kernel after its last wait, and
  // by recover; read by every block of the owner's next kernel; nothing else becomes visible.
  std::uint64_t epoch;
  // Zero while all is well, else 1 + the rank whose wait expired. Written by that rank into every
  // part after the report; polled by every wait of the owner; the owner's report becomes visible.
  // Cleared only by recover, when no kernel runs.
  std::uint64_t abort_word;
  // In rank 0's part only: taken by the thread that may report, as only the first failure is told.
  std::uint64_t report_claim;
  WaitReport report;
  // The epoch of the rank's last combine in this generation, or 0. Written as `epoch` is, and read
  // by the rank's next dispatch: what every peer's `consumed` must have reached.
  std::uint64_t last_combine;
};

inline constexpr std::int64_t kControlBytes = 256;
static_assert(sizeof(RankControl) <= kControlBytes);

// Passed to kernels by value.
struct GroupView {
  std::byte* parts[kMaxDeviceRanks];
  std::uint64_t bound_ns;  // of every wait
  std::int32_t num_ranks;
};

// What a rank in a process of its own needs of the others on the host. All but `failure` are
// collective, bounded, and throw world for a rank that does not come.
struct RankProcess {
  int rank = 0;
  int num_ranks = 1;
  // Gives the own descriptor, gets those of all, by rank.
  std::function<std::vector<Descriptor>(const Descriptor& own)> exchange;
  // The largest value that any rank gave; afterwards all have come.
  std::function<std::uint64_t(std::uint64_t value)> largest;
  // Clears `failure`; no rank returns before all have come.
  std::function<void()> recover;
  // Why the group has failed on the host, a lost rank for example, or nothing. Called often.
  std::function<std::optional<std::string>()> failure;
};

// Residency: the blocks of one operation, over all ranks, must be resident at the same time, since
// they wait for each other. A launch that cannot be is refused before it starts; one that loses a
// peer on the way ends within the bound.
class SymmetricMemory {
 public:
  // `bytes_per_rank` includes kControlBytes; all parts start as zeros. Errors: invalid_argument for
  // sizes; world if the memory is not there.
  SymmetricMemory(int num_ranks, std::int64_t bytes_per_rank, std::chrono::nanoseconds bound);
  // Collective: the part of this process's rank, on its current GPU, and those of all others, on
  // one machine. The same sizes on every rank. Errors: as above, and of RankProcess.
  SymmetricMemory(RankProcess process, std::int64_t bytes_per_rank, std::chrono::nanoseconds bound);
  SymmetricMemory(const SymmetricMemory&) = delete;
  SymmetricMemory& operator=(const SymmetricMemory&) = delete;
  ~SymmetricMemory();

  [[nodiscard]] int num_ranks() const { return view_.num_ranks; }
  [[nodiscard]] std::int64_t bytes_per_rank() const { return bytes_per_rank_; }
  [[nodiscard]] const GroupView& view() const { return view_; }

  // Waits for `stream`. Errors: world, with rank, stage, peer and values, if a wait expired since
  // the last recover (whatever was launched after it did nothing); world if CUDA failed; with ranks
  // as processes, world as soon as the group has failed on the host: kernels of this rank that
  // still wait are told to end.
  void check(cudaStream_t stream) const;

  // Waits for the device, then makes the group usable again in a new generation: every signal of
  // before lies below all that is awaited from now on. Collective with ranks as processes.
  void recover();

 private:
  void set_up(int num_ranks, std::int64_t bytes_per_rank, std::chrono::nanoseconds bound);
  void wait(cudaStream_t stream) const;
  void end_waits() const;

  GroupView view_{};
  std::optional<RankProcess> process_;  // nothing with virtual ranks
  int first_rank_ = 0;                  // of this process
  int num_local_ranks_ = 0;
  std::vector<SharedAllocation> parts_;  // by rank; with processes
  std::int64_t bytes_per_rank_ = 0;
  std::byte* memory_ = nullptr;
};

}  // namespace uniep::cuda
