// SPDX-License-Identifier: Apache-2.0
#include "cuda/symmetric_memory.hpp"

#include <algorithm>
#include <cstddef>
#include <thread>
#include <utility>

#include "base/error.hpp"

namespace uniep::cuda {
namespace {

constexpr std::int64_t kPartAlignment = 256;  // bytes
// Words of a fused operation hold epoch << 20 (FusedWords), so epochs have 44 bits.
constexpr std::uint64_t kMaxGenerations = std::uint64_t{1} << 12;

const char* name(WaitStage stage) {
  switch (stage) {
    case WaitStage::plan_blocks:
      return "plan, counts of a rank's blocks";
    case WaitStage::plan_counts:
      return "plan, exchange of counts";
    case WaitStage::plan_order:
      return "plan, exchange of send orders";
    case WaitStage::dispatch_consumed:
      return "dispatch, end of the peer's operation before";
    case WaitStage::dispatch_tokens:
      return "dispatch, the peer's number of tokens";
    case WaitStage::dispatch_rows:
      return "dispatch, rows of the peer";
    case WaitStage::dispatch_end:
      return "dispatch, end of the rank's blocks";
    case WaitStage::gemm1_rows:
      return "gemm1, rows from the rank's movers, by 64";
    case WaitStage::combine_rows:
      return "combine, results of the peer";
    case WaitStage::combine_end:
      return "combine, end of the rank's blocks";
  }
  return "?";
}

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_world("{}: {}", what, cudaGetErrorString(error));
}

RankControl read_control(const std::byte* part) {
  RankControl control;
  check_cuda(cudaMemcpy(&control, part, sizeof(control), cudaMemcpyDeviceToHost),
             "the state of the symmetric memory cannot be read");
  return control;
}

std::string describe(const WaitReport& report) {
  std::string text = fmt::format("rank {} waited {} ms in stage {}, for rank {}", report.rank,
                                 report.waited_ns / 1000000,
                                 name(static_cast<WaitStage>(report.stage)), report.peer);
  if (report.block >= 0) text += fmt::format(", block {}", report.block);
  return text + fmt::format(": expected {}, seen {}", report.expected, report.seen);
}

}  // namespace

void SymmetricMemory::set_up(int num_ranks, std::int64_t bytes_per_rank,
                             std::chrono::nanoseconds bound) {
  if (num_ranks < 1 || num_ranks > kMaxDeviceRanks) {
    throw_invalid("{} ranks in a symmetric memory on the GPU; 1 to {} are valid", num_ranks,
                  kMaxDeviceRanks);
  }
  constexpr std::int64_t kMaxBytes = std::int64_t{1} << 48;
  if (bytes_per_rank < kControlBytes || bytes_per_rank > kMaxBytes) {
    throw_invalid("a rank's symmetric memory of {} bytes; {} to {} are valid", bytes_per_rank,
                  kControlBytes, kMaxBytes);
  }
  if (bound.count() <= 0)
    throw_invalid("a bound of waits of {} ns; it must be above 0", bound.count());
  bytes_per_rank_ = (bytes_per_rank + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  view_.bound_ns = static_cast<std::uint64_t>(bound.count());
  view_.num_ranks = num_ranks;
}

SymmetricMemory::SymmetricMemory(int num_ranks, std::int64_t bytes_per_rank,
                                 std::chrono::nanoseconds bound)
    : num_local_ranks_(num_ranks) {
  set_up(num_ranks, bytes_per_rank, bound);
  const auto bytes = static_cast<std::size_t>(bytes_per_rank_ * num_ranks);
  if (const cudaError_t error = cudaMalloc(&memory_, bytes); error != cudaSuccess) {
    throw_world("symmetric memory of {} ranks with {} bytes each is not there: {}", num_ranks,
                bytes_per_rank_, cudaGetErrorString(error));
  }
  cudaError_t error = cudaMemset(memory_, 0, bytes);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    cudaFree(memory_);
    throw_world("symmetric memory cannot be cleared: {}", cudaGetErrorString(error));
  }
  for (int rank = 0; rank < num_ranks; ++rank) view_.parts[rank] = memory_ + rank * bytes_per_rank_;
}

SymmetricMemory::SymmetricMemory(RankProcess process, std::int64_t bytes_per_rank,
                                 std::chrono::nanoseconds bound)
    : process_(std::move(process)), first_rank_(process_->rank), num_local_ranks_(1) {
  set_up(process_->num_ranks, bytes_per_rank, bound);
  if (first_rank_ < 0 || first_rank_ >= num_ranks()) {
    throw_invalid("rank {} of a symmetric memory of {} ranks; ranks are 0 to {}", first_rank_,
                  num_ranks(), num_ranks() - 1);
  }
  // All zeros before anybody else can reach it.
  SharedAllocation own(bytes_per_rank_);
  const std::vector<Descriptor> all = process_->exchange(own.share());
  for (int rank = 0; rank < num_ranks(); ++rank) {
    if (rank == first_rank_) {
      parts_.push_back(std::move(own));
    } else {
      parts_.emplace_back(bytes_per_rank_, all[static_cast<std::size_t>(rank)]);
    }
    view_.parts[rank] = parts_.back().get();
  }
}

SymmetricMemory::~SymmetricMemory() { cudaFree(memory_); }

// Tells the waits of this process's ranks to end.
void SymmetricMemory::end_waits() const {
  cudaStream_t beside = nullptr;  // one that does not wait for the kernels
  check_cuda(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking),
             "a group that failed cannot be ended");
  const std::uint64_t word = static_cast<std::uint64_t>(first_rank_) + 1;
  cudaError_t error = cudaMemcpyAsync(view_.parts[first_rank_] + offsetof(RankControl, abort_word),
                                      &word, sizeof(word), cudaMemcpyHostToDevice, beside);
  if (error == cudaSuccess) error = cudaStreamSynchronize(beside);
  cudaStreamDestroy(beside);
  check_cuda(error, "a group that failed cannot be ended");
}

void SymmetricMemory::wait(cudaStream_t stream) const {
  if (process_) {
    cudaError_t error = cudaSuccess;
    while ((error = cudaStreamQuery(stream)) == cudaErrorNotReady) {
      if (const auto failure = process_->failure()) {
        end_waits();
        check_cuda(cudaStreamSynchronize(stream), "a kernel of the group failed");
        throw_world("{}", *failure);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    check_cuda(error, "a kernel of the group failed");
  }
  check_cuda(cudaStreamSynchronize(stream), "a kernel of the group failed");
}

void SymmetricMemory::check(cudaStream_t stream) const {
  wait(stream);
  const RankControl control = read_control(view_.parts[first_rank_]);
  if (control.abort_word != 0) throw_world("{}", describe(control.report));
}

void SymmetricMemory::recover() {
  check_cuda(cudaDeviceSynchronize(), "a kernel of the group failed");
  std::uint64_t epoch = 0;
  for (int rank = first_rank_; rank < first_rank_ + num_local_ranks_; ++rank) {
    epoch = std::max(epoch, read_control(view_.parts[rank]).epoch);
  }
  if (process_) {
    process_->recover();
    epoch = process_->largest(epoch);
  }
  const std::uint64_t generation = (epoch >> 32) + 1;
  if (generation >= kMaxGenerations) {
    throw_world("symmetric memory that was recovered {} times; it must be made anew",
                generation - 1);
  }
  RankControl fresh{};
  fresh.epoch = generation << 32;
  for (int rank = first_rank_; rank < first_rank_ + num_local_ranks_; ++rank) {
    check_cuda(cudaMemcpy(view_.parts[rank], &fresh, sizeof(fresh), cudaMemcpyHostToDevice),
               "the state of the symmetric memory cannot be written");
  }
  // A peer that goes on may at once report into this part.
  if (process_) static_cast<void>(process_->largest(0));
}

}  // namespace uniep::cuda
