// SPDX-License-Identifier: Apache-2.0
#include "cuda/symmetric_memory.hpp"

#include <algorithm>

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

SymmetricMemory::SymmetricMemory(int num_ranks, std::int64_t bytes_per_rank,
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
  view_.bound_ns = static_cast<std::uint64_t>(bound.count());
  view_.num_ranks = num_ranks;
}

SymmetricMemory::~SymmetricMemory() { cudaFree(memory_); }

void SymmetricMemory::check(cudaStream_t stream) const {
  check_cuda(cudaStreamSynchronize(stream), "a kernel of the group failed");
  const RankControl control = read_control(view_.parts[0]);
  if (control.abort_word != 0) throw_world("{}", describe(control.report));
}

void SymmetricMemory::recover() {
  check_cuda(cudaDeviceSynchronize(), "a kernel of the group failed");
  RankControl fresh{};
  for (int rank = 0; rank < num_ranks(); ++rank) {
    fresh.epoch = std::max(fresh.epoch, read_control(view_.parts[rank]).epoch);
  }
  const std::uint64_t generation = (fresh.epoch >> 32) + 1;
  if (generation >= kMaxGenerations) {
    throw_world("symmetric memory that was recovered {} times; it must be made anew",
                generation - 1);
  }
  fresh.epoch = generation << 32;
  for (int rank = 0; rank < num_ranks(); ++rank) {
    check_cuda(cudaMemcpy(view_.parts[rank], &fresh, sizeof(fresh), cudaMemcpyHostToDevice),
               "the state of the symmetric memory cannot be written");
  }
}

}  // namespace uniep::cuda
