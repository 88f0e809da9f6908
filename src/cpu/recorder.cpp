// SPDX-License-Identifier: Apache-2.0
#include "cpu/recorder.hpp"

#include <chrono>
#include <exception>

#include "memory/signal.hpp"

namespace uniep::cpu {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder::Recorder(int rank, int workers, std::int64_t capacity) : rank_(rank) {
  if (capacity == 0) return;
  for (int worker = 0; worker < workers; ++worker) rings_.emplace_back(capacity);
}

void Recorder::begin(Pass pass) {
  pass_ = pass;
  for (TraceRing& ring : rings_) ring.clear();
}

Trace Recorder::trace() const {
  Trace trace;
  for (const TraceRing& ring : rings_) ring.append_to(trace);
  return trace;
}

TraceEvent Recorder::event(TraceKind kind, int worker, std::int64_t start_ns) const {
  TraceEvent event;
  event.start_ns = start_ns;
  event.rank = static_cast<std::int16_t>(rank_);
  event.worker = static_cast<std::int16_t>(worker);
  event.kind = kind;
  event.pass = pass_;
  return event;
}

void Recorder::keep_wait(int worker, std::int64_t start_ns, const Awaited& awaited, bool failed) {
  TraceEvent event = this->event(TraceKind::wait, worker, start_ns);
  const WaitSite& site = awaited.site;
  if (awaited.word != nullptr) {
    event.awaited = static_cast<std::uint32_t>(awaited.expected);
    event.seen = static_cast<std::uint32_t>(read_acquire(awaited.word));
  }
  event.index = static_cast<std::int32_t>(site.tile);
  event.expert = site.expert;
  event.peer =
      static_cast<std::int16_t>(awaited.word == nullptr || site.peer >= 0 ? site.peer : rank_);
  event.role = site.task_role;
  event.signal = site.signal;
  event.failed = failed ? 1 : 0;
  keep(event);
}

void Recorder::wait(GroupState& state, const Awaited& awaited, int worker) {
  if (!on() || read_acquire(awaited.word) >= awaited.expected) {
    return wait_at_least(state, awaited.word, awaited.expected, awaited.site);
  }
  const std::int64_t start = now_ns();
  try {
    wait_at_least(state, awaited.word, awaited.expected, awaited.site);
  } catch (...) {
    keep_wait(worker, start, awaited, true);
    throw;
  }
  keep_wait(worker, start, awaited, false);
}

RecordedSpan::RecordedSpan(Recorder& recorder, TraceKind kind, int worker)
    : recorder_(recorder), exceptions_(std::uncaught_exceptions()) {
  if (recorder.on()) event = recorder.event(kind, worker, now_ns());
}

RecordedSpan::~RecordedSpan() {
  if (!recorder_.on()) return;
  event.failed = std::uncaught_exceptions() > exceptions_ ? 1 : 0;
  recorder_.keep(event);
}

}  // namespace uniep::cpu
