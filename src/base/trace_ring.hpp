// SPDX-License-Identifier: Apache-2.0
// The records of one worker, bounded: a full ring goes on from its start, and what it overwrites is
// counted. Written by one thread without locks; read when that thread has been joined.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "base/error.hpp"
#include "uniep/trace.hpp"

namespace uniep {

class TraceRing {
 public:
  // At least `capacity` records, at least 1, rounded up to a power of two. Pages that nobody writes
  // take no memory.
  explicit TraceRing(std::int64_t capacity)
      : mask_(std::bit_ceil(static_cast<std::uint64_t>(capacity)) - 1),
        data_(static_cast<std::byte*>(::operator new (static_cast<std::size_t>(mask_ + 1) * kBytes,
                                                      std::align_val_t{kBytes}))) {
    UNIEP_ASSERT(capacity >= 1);
  }

  // A whole cache line each: no worker's record moves another's.
  void record(const TraceEvent& event) {
    std::memcpy(data_.get() + (count_ & mask_) * kBytes, &event, kBytes);
    ++count_;
  }

  void clear() { count_ = 0; }

  // Adds what is kept to `trace`, oldest first, and what was lost to its count.
  void append_to(Trace& trace) const {
    const std::uint64_t lost = count_ > mask_ + 1 ? count_ - mask_ - 1 : 0;
    trace.dropped += static_cast<std::int64_t>(lost);
    const std::size_t before = trace.events.size();
    trace.events.resize(before + static_cast<std::size_t>(count_ - lost));
    for (std::uint64_t i = lost; i < count_; ++i) {
      std::memcpy(&trace.events[before + static_cast<std::size_t>(i - lost)],
                  data_.get() + (i & mask_) * kBytes, kBytes);
    }
  }

 private:
  static constexpr std::size_t kBytes = sizeof(TraceEvent);
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kBytes}); }
  };

  std::uint64_t mask_;
  std::unique_ptr<std::byte, Free> data_;
  std::uint64_t count_ = 0;  // records written since clear()
};

}  // namespace uniep
