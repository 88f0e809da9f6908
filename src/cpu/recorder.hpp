// SPDX-License-Identifier: Apache-2.0
// The records of one rank's workers, a ring each; with no rings nothing is recorded or timed.
#pragma once

#include <cstdint>
#include <vector>

#include "base/trace_ring.hpp"
#include "memory/wait.hpp"
#include "uniep/trace.hpp"

namespace uniep::cpu {

[[nodiscard]] std::int64_t now_ns();  // steady clock

class Recorder {
 public:
  // `capacity` records for each worker; 0: off.
  Recorder(int rank, int workers, std::int64_t capacity);

  [[nodiscard]] bool on() const { return !rings_.empty(); }

  // With no worker running: what was recorded before is gone.
  void begin(Pass pass);
  // With no worker running: what the workers recorded since begin().
  [[nodiscard]] Trace trace() const;

  // A worker calls these for itself; worker 0 is the thread that called the layer.
  [[nodiscard]] TraceEvent event(TraceKind kind, int worker, std::int64_t start_ns) const;
  // Ends now.
  void keep(TraceEvent& event) {
    event.end_ns = now_ns();
    rings_[static_cast<std::size_t>(event.worker)].record(event);
  }
  // A wait that ends now; an `awaited` without a word says that nobody knows for what.
  void keep_wait(int worker, std::int64_t start_ns, const Awaited& awaited, bool failed);
  // As wait_at_least; one that is met at the first look leaves no record.
  void wait(GroupState& state, const Awaited& awaited, int worker);

 private:
  int rank_;
  Pass pass_ = Pass::forward;
  std::vector<TraceRing> rings_;  // of each worker; empty: off
};

// One record, from here to the end of the scope; failed if that is an exception.
class RecordedSpan {
 public:
  RecordedSpan(Recorder& recorder, TraceKind kind, int worker = 0);
  ~RecordedSpan();
  RecordedSpan(const RecordedSpan&) = delete;
  RecordedSpan& operator=(const RecordedSpan&) = delete;

  TraceEvent event;  // to be filled in, where the recorder is on

 private:
  Recorder& recorder_;
  int exceptions_;
};

}  // namespace uniep::cpu
