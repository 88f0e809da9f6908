// SPDX-License-Identifier: Apache-2.0
#include "train/exchange.hpp"

#include <utility>

#include "base/error.hpp"

namespace uniep::train {

void Exchange::meet(int rank, const char* purpose) {
  std::unique_lock lock(mutex_);
  const std::uint64_t meeting = meetings_;
  if (!failure_ && ++arrived_ == num_ranks_) {
    arrived_ = 0;
    ++meetings_;
    changed_.notify_all();
    return;
  }
  const bool ended =
      changed_.wait_for(lock, bound_, [&] { return failure_ != nullptr || meetings_ != meeting; });
  if (meetings_ != meeting) return;
  if (!ended) {
    const auto seconds = std::chrono::duration_cast<std::chrono::milliseconds>(bound_).count();
    throw_world("rank {} waited {} ms to {}: {} of {} ranks came", rank, seconds, purpose, arrived_,
                num_ranks_);
  }
  throw_world("rank {} stopped because another rank failed", rank);
}

void Exchange::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(error);
  changed_.notify_all();
}

void Exchange::rethrow() const {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

}  // namespace uniep::train
