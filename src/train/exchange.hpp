// SPDX-License-Identifier: Apache-2.0
// Where rank threads meet outside of the layer: a barrier that is bounded and ends early when a
// rank has failed. What they exchange lies in plain shared arrays; what was written before a
// meeting is visible after it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

namespace uniep::train {

class Exchange {
 public:
  Exchange(int num_ranks, std::chrono::nanoseconds bound) : num_ranks_(num_ranks), bound_(bound) {}

  // Returns when all ranks have come. Errors: world if one does not come within the bound, or if
  // one failed. `purpose` ends the sentence.
  void meet(int rank, const char* purpose);

  // Ends this and every later meeting; the first failure is kept.
  void fail(std::exception_ptr error);
  // Rethrows it, if there is one.
  void rethrow() const;

 private:
  const int num_ranks_;
  const std::chrono::nanoseconds bound_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  std::uint64_t meetings_ = 0;
  std::exception_ptr failure_;
};

}  // namespace uniep::train
