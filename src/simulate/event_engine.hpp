// SPDX-License-Identifier: Apache-2.0
// Tasks on a virtual clock. Workers draw the next task of their list, wait until what it needs is
// there, and hold its resources while they do it: as blocks of a persistent kernel do. A task that
// nobody can ever start is an error that names it, so a list whose waiting tasks stand before their
// producers is refused instead of simulated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "uniep/trace.hpp"

namespace uniep::simulate {

struct Need {
  int counter = 0;
  double at_least = 0;
};
struct Raise {
  int counter = 0;
  double by = 0;
  double delay_us = 0;  // until its waiters see it
};
// Bytes through a resource that serves one after the other.
struct Use {
  int resource = 0;
  double bytes = 0;
};

struct SimTask {
  TraceEvent event;    // rank, role, index, part, expert, peer, flops and link bytes of the record
  double busy_us = 0;  // of the worker, where no resource takes longer
  Signal signal = Signal::none;  // what it waits for, for the record
  std::vector<Need> needs;
  std::vector<Raise> raises;  // when it ends
  std::vector<Use> uses;
};

class EventEngine {
 public:
  [[nodiscard]] int add_counter();
  [[nodiscard]] int add_resource(double bytes_per_us);
  [[nodiscard]] int add_list();
  void add_task(int list, SimTask task);
  // Lists are drawn from one after the other; a worker begins with none before all counters of
  // `needs` are there, and then `after_us` later. When it finds all empty, it raises `ended` by 1.
  struct Stretch {
    std::vector<int> lists;
    std::vector<Need> needs;
    double after_us = 0;
    int ended = -1;
    std::int16_t rank = 0;  // of the record of that wait
    Pass pass = Pass::forward;
    bool is_quiet = false;  // its block does something else meanwhile, so the wait is no idle time
  };
  // `unit` and `worker` name its lane in the records. Stretches are done in their order.
  void add_worker(std::int16_t worker, std::uint8_t unit, std::vector<Stretch> stretches);

  struct Result {
    double end_us = 0;
    std::vector<TraceEvent> events;  // as they ended; times in nanoseconds from 0
  };
  // Errors: invalid_argument names the first task that cannot start.
  [[nodiscard]] Result run();

 private:
  struct Counter {
    double value = 0;
    std::vector<int> waiting;  // workers
  };
  struct Resource {
    double rate = 1;
    double free_at = 0;
  };
  struct List {
    std::vector<SimTask> tasks;
    std::size_t next = 0;
  };
  struct Worker {
    std::int16_t worker = 0;
    std::uint8_t unit = 0;
    std::vector<Stretch> stretches;
    std::size_t stretch = 0, list = 0;
    bool is_in = false;  // has begun its stretch
    const SimTask* task = nullptr;
    double since = 0;  // of the wait it is in
    bool is_waiting = false;
  };
  struct Event {
    double at;
    std::uint64_t order;
    int worker;  // that ended its task or wakes up; -1: `raise`
    bool ended;
    Raise raise;
    friend bool operator>(const Event& a, const Event& b) {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    }
  };
  class Run;

  std::vector<Counter> counters_;
  std::vector<Resource> resources_;
  std::vector<List> lists_;
  std::vector<Worker> workers_;
};

}  // namespace uniep::simulate
