// SPDX-License-Identifier: Apache-2.0
#include "simulate/event_engine.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>

#include "base/error.hpp"

namespace uniep::simulate {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }
std::int64_t to_ns(double us) { return std::llround(us * 1e3); }

}  // namespace

int EventEngine::add_counter() {
  counters_.emplace_back();
  return static_cast<int>(counters_.size()) - 1;
}

int EventEngine::add_resource(double bytes_per_us) {
  resources_.push_back({.rate = bytes_per_us});
  return static_cast<int>(resources_.size()) - 1;
}

int EventEngine::add_list() {
  lists_.emplace_back();
  return static_cast<int>(lists_.size()) - 1;
}

void EventEngine::add_task(int list, SimTask task) {
  lists_[at(list)].tasks.push_back(std::move(task));
}

void EventEngine::add_worker(std::int16_t worker, std::uint8_t unit,
                             std::vector<Stretch> stretches) {
  Worker w;
  w.worker = worker;
  w.unit = unit;
  w.stretches = std::move(stretches);
  workers_.push_back(std::move(w));
}

class EventEngine::Run {
 public:
  explicit Run(EventEngine& engine) : e_(engine) {}

  Result run() {
    for (std::size_t i = 0; i < e_.workers_.size(); ++i) advance(static_cast<int>(i));
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.at;
      if (event.worker < 0) {
        raise_now(event.raise);
      } else if (event.ended) {
        finish(event.worker);
      } else {
        advance(event.worker);
      }
    }
    check_all_done();
    result_.end_us = end_;
    return std::move(result_);
  }

 private:
  void push(double when, int worker, bool ended, Raise raise = {}) {
    events_.push({when, order_++, worker, ended, raise});
  }

  void raise(const Raise& r) {
    if (r.delay_us > 0) {
      push(now_ + r.delay_us, -1, false, r);
    } else {
      raise_now(r);
    }
  }

  void raise_now(const Raise& r) {
    Counter& counter = e_.counters_[at(r.counter)];
    counter.value += r.by;
    // They look again, and wait again where it is not enough.
    std::vector<int> woken;
    woken.swap(counter.waiting);
    for (const int worker : woken) push(now_, worker, false);
  }

  // The first need that is not met, to which the worker is added; or none.
  bool must_wait(int worker, const std::vector<Need>& needs) {
    for (const Need& need : needs) {
      Counter& counter = e_.counters_[at(need.counter)];
      if (counter.value >= need.at_least - 1e-6) continue;
      counter.waiting.push_back(worker);
      Worker& w = e_.workers_[at(worker)];
      if (!w.is_waiting) w.since = now_;
      w.is_waiting = true;
      return true;
    }
    return false;
  }

  void record_wait(Worker& w, Signal signal, TraceEvent event) {
    if (!w.is_waiting) return;
    w.is_waiting = false;
    if (to_ns(now_) == to_ns(w.since)) return;
    event.flops = event.link_bytes = 0;
    event.kind = TraceKind::wait;
    event.signal = signal;
    event.part = -1;
    keep(w, event, w.since, now_);
  }

  void keep(const Worker& w, TraceEvent event, double start, double end) {
    event.start_ns = to_ns(start);
    event.end_ns = to_ns(end);
    event.worker = w.worker;
    event.unit = w.unit;
    result_.events.push_back(event);
    end_ = std::max(end_, end);
  }

  // Goes on until the worker has begun a task, waits, or has nothing left.
  void advance(int worker) {
    Worker& w = e_.workers_[at(worker)];
    while (w.stretch < w.stretches.size()) {
      const Stretch& stretch = w.stretches[w.stretch];
      if (!w.is_in) {
        if (must_wait(worker, stretch.needs)) return;
        TraceEvent idle;
        idle.rank = stretch.rank;
        idle.pass = stretch.pass;
        if (stretch.is_quiet) w.is_waiting = false;
        record_wait(w, Signal::phase_done, idle);
        w.is_in = true;
        if (stretch.after_us > 0) return push(now_ + stretch.after_us, worker, false);
      }
      if (w.task == nullptr) w.task = draw(w, stretch);
      if (w.task == nullptr) {
        const int ended = stretch.ended;
        ++w.stretch;
        w.list = 0;
        w.is_in = false;
        if (ended >= 0) raise_now({ended, 1, 0});
        continue;
      }
      if (must_wait(worker, w.task->needs)) return;
      record_wait(w, w.task->signal, w.task->event);
      return start(worker);
    }
  }

  const SimTask* draw(Worker& w, const Stretch& stretch) {
    for (; w.list < stretch.lists.size(); ++w.list) {
      List& list = e_.lists_[at(stretch.lists[w.list])];
      if (list.next < list.tasks.size()) return &list.tasks[list.next++];
    }
    return nullptr;
  }

  void start(int worker) {
    Worker& w = e_.workers_[at(worker)];
    double end = now_ + w.task->busy_us;
    for (const Use& use : w.task->uses) {
      Resource& resource = e_.resources_[at(use.resource)];
      resource.free_at = std::max(resource.free_at, now_) + use.bytes / resource.rate;
      end = std::max(end, resource.free_at);
    }
    w.since = now_;
    push(end, worker, true);
  }

  void finish(int worker) {
    Worker& w = e_.workers_[at(worker)];
    const SimTask& task = *w.task;
    keep(w, task.event, w.since, now_);
    w.task = nullptr;
    for (const Raise& r : task.raises) raise(r);
    advance(worker);
  }

  void check_all_done() const {
    for (const Worker& w : e_.workers_) {
      if (w.task != nullptr) {
        throw_invalid(
            "the {} of rank {}, index {}, waits for what nobody will raise: tasks must be drawn "
            "after those they need",
            to_string(w.task->event.role), w.task->event.rank, w.task->event.index);
      }
    }
    for (const List& list : e_.lists_) {
      if (list.next < list.tasks.size()) {
        const TraceEvent& event = list.tasks[list.next].event;
        throw_invalid("the {} of rank {}, index {}, is drawn by nobody", to_string(event.role),
                      event.rank, event.index);
      }
    }
  }

  EventEngine& e_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t order_ = 0;
  double now_ = 0, end_ = 0;
  Result result_;
};

EventEngine::Result EventEngine::run() { return Run(*this).run(); }

}  // namespace uniep::simulate
