// SPDX-License-Identifier: Apache-2.0
// What the timeline's records say: every task once, true amounts of work, and who waited for whom,
// also where a rank failed.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>

#include "layer_support.hpp"
#include "topo/placement.hpp"
#include "uniep/layer.hpp"

namespace uniep::test {
namespace {

const std::vector<std::string> kSchedules = {
    "workers=1",
    "workers=2,tile_m=8,tile_n=64",
    "workers=3,comm_workers=1,chunk=4",
    "workers=2,payload=choice",
    "workers=2,direction=pull",
    "workers=2,direction=pull,payload=choice",
    "fusion=split,workers=2,tile_m=8",
    "fusion=split,direction=pull,wgrad=after",
};

Trace traced_run(const Case& data, RunOptions options) {
  Trace trace;
  options.trace = &trace;
  static_cast<void>(run_case(data, options));
  return trace;
}

RunOptions options_of(const std::string& schedule, int num_ranks) {
  RunOptions options;
  options.num_ranks = num_ranks;
  options.schedule = parse_schedule(schedule, {});
  options.backward = true;
  return options;
}

TEST(Trace, HasEveryTaskOfEveryRankOnce) {
  const Case data = random_case({.tokens = 40}, DType::f32);
  for (const std::string& text : kSchedules) {
    for (const bool processes : {false, true}) {
      SCOPED_TRACE(text);
      RunOptions options = options_of(text, 3);
      options.processes = processes;
      std::map<std::pair<int, Role>, int> started, traced;
      std::mutex mutex;
      options.before_task = [&](const TaskInfo& task) {
        const std::lock_guard lock(mutex);
        ++started[{task.rank, task.role}];
      };
      const Trace trace = traced_run(data, options);
      EXPECT_EQ(trace.dropped, 0);
      for (const TraceEvent& event : trace.events) {
        EXPECT_EQ(event.failed, 0);
        if (event.kind == TraceKind::task) ++traced[{event.rank, event.role}];
      }
      // A process counts its own.
      if (!processes) {
        EXPECT_EQ(started, traced);
      }
      for (int rank = 0; rank < 3; ++rank) {
        for (const Role role : {Role::send, Role::fanout, Role::gemm1, Role::gemm2, Role::dgrad2,
                                Role::dgrad1, Role::wgrad2, Role::wgrad1, Role::reduce}) {
          EXPECT_GT((traced[{rank, role}]), 0) << rank << " " << to_string(role);
        }
      }
    }
  }
}

// Of each rank and pass one operation, which holds all else; a worker does one thing at a time,
// save that a plan's wait lies in the plan.
TEST(Trace, TimesFitIntoOneAnother) {
  const Case data = random_case({.tokens = 40}, DType::f32);
  for (const std::string& text : kSchedules) {
    SCOPED_TRACE(text);
    const Trace trace = traced_run(data, options_of(text, 3));
    std::map<std::pair<int, Pass>, TraceEvent> operations;
    for (const TraceEvent& event : trace.events) {
      EXPECT_GT(event.start_ns, 0);
      EXPECT_LE(event.start_ns, event.end_ns);
      if (event.kind != TraceKind::operation) continue;
      EXPECT_TRUE(operations.try_emplace({event.rank, event.pass}, event).second);
    }
    EXPECT_EQ(operations.size(), 6U);
    int plans = 0;
    std::map<std::pair<int, int>, std::int64_t> free_at;  // by rank and worker
    for (const TraceEvent& event : trace.events) {
      const TraceEvent& whole = operations.at({event.rank, event.pass});
      EXPECT_GE(event.start_ns, whole.start_ns);
      EXPECT_LE(event.end_ns, whole.end_ns);
      if (event.kind == TraceKind::operation) continue;
      if (event.kind == TraceKind::plan) {
        ++plans;
        continue;
      }
      std::int64_t& from = free_at[{event.rank, event.worker}];
      EXPECT_GE(event.start_ns, from);
      from = event.end_ns;
    }
    EXPECT_EQ(plans, 6);
  }
}

// Products are 18 H F a row over both passes, whatever the tiles. What crosses ranks: a dispatched
// row for each choice, or for each token and destination, and a result for each choice, both ways.
TEST(Trace, CountsEveryFlopAndEveryByteOnce) {
  const Case data = random_case({.tokens = 40, .topk = 3}, DType::bf16, "W0", 1, 0.2);
  const int num_ranks = 3;
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), num_ranks);
  const auto tokens = tokens_of_ranks(data, num_ranks);
  std::int64_t rows = 0, away = 0, dispatched = 0, token = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    for (const std::int64_t end = token + tokens[at(rank)]; token < end; ++token) {
      std::set<int> destinations;
      for (std::int64_t i = token * data.topk; i < (token + 1) * data.topk; ++i) {
        if (data.topk_ids[at(i)] < 0) continue;
        ++rows;
        const int owner = placement.rank_of[at(data.topk_ids[at(i)])];
        if (owner == rank) continue;
        ++away;
        destinations.insert(owner);
      }
      dispatched += static_cast<std::int64_t>(destinations.size());
    }
  }
  ASSERT_LT(dispatched, away);
  for (const std::string& text : kSchedules) {
    SCOPED_TRACE(text);
    const RunOptions options = options_of(text, num_ranks);
    std::int64_t flops = 0, link_bytes = 0;
    for (const TraceEvent& event : traced_run(data, options).events) {
      flops += event.flops;
      link_bytes += event.link_bytes;
    }
    EXPECT_EQ(flops, 18 * rows * data.hidden * data.ffn);
    const std::int64_t sent = options.schedule.payload == Payload::choice ? away : dispatched;
    EXPECT_EQ(link_bytes, 2 * (sent + away) * data.hidden * 2);
  }
}

TEST(Trace, NamesTheExpertAndThePeerOfATask) {
  const Case data = random_case({.tokens = 40, .experts = 7}, DType::f32);
  const Placement placement = make_contiguous_placement(7, 3);
  const Trace trace = traced_run(data, options_of("workers=2,direction=pull", 3));
  std::set<std::int32_t> experts;
  for (const TraceEvent& event : trace.events) {
    if (event.kind != TraceKind::task) continue;
    const bool is_product = event.role == Role::gemm1 || event.role == Role::gemm2 ||
                            event.role == Role::dgrad2 || event.role == Role::dgrad1 ||
                            event.role == Role::wgrad2 || event.role == Role::wgrad1;
    EXPECT_EQ(event.part >= 0, is_product) << to_string(event.role);
    EXPECT_EQ(event.flops > 0, is_product) << to_string(event.role);
    EXPECT_EQ(event.peer >= 0, event.role == Role::pull) << to_string(event.role);
    if (event.expert >= 0) {
      EXPECT_EQ(placement.rank_of[at(event.expert)], event.rank);
      experts.insert(event.expert);
    }
  }
  EXPECT_EQ(experts, (std::set<std::int32_t>{0, 1, 2, 3, 4, 5, 6}));
}

// A rank that stops sending: the last record of every worker of the others is the failed wait for
// that rank's row, as the error says it; from threads and from processes.
TEST(Trace, ShowsWhatEveryWorkerStoodAtWhenARankHung) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  for (const bool processes : {false, true}) {
    for (const char* text : {"workers=2", "workers=1,direction=pull", "fusion=split,workers=2"}) {
      SCOPED_TRACE(text);
      RunOptions options = options_of(text, 2);
      options.processes = processes;
      options.wait_bound = std::chrono::milliseconds(300);
      options.before_task = [](const TaskInfo& task) {
        if (task.rank == 1 && task.role == Role::send) {
          std::this_thread::sleep_for(std::chrono::seconds(1));
        }
      };
      Trace trace;
      options.trace = &trace;
      EXPECT_THROW(static_cast<void>(run_case(data, options)), Error);
      std::map<int, TraceEvent> last;  // by worker of rank 0
      for (const TraceEvent& event : trace.events) {
        if (event.rank == 0 && event.kind == TraceKind::wait) last[event.worker] = event;
      }
      const bool pull = options.schedule.direction == Direction::pull;
      EXPECT_EQ(last.size(), static_cast<std::size_t>(options.schedule.workers));
      for (const auto& [worker, event] : last) {
        EXPECT_EQ(event.failed, 1);
        EXPECT_EQ(event.signal, pull ? Signal::send_ready : Signal::row_ready);
        EXPECT_EQ(event.role, pull ? Role::pull : Role::fanout);
        EXPECT_EQ(event.peer, 1);
        EXPECT_EQ(event.awaited, 1U);
        EXPECT_EQ(event.seen, 0U);
      }
      // The operation failed too, and a worker has nothing after its failed wait.
      EXPECT_EQ(std::count_if(trace.events.begin(), trace.events.end(),
                              [](const TraceEvent& event) {
                                return event.rank == 0 && event.kind == TraceKind::operation &&
                                       event.failed == 1;
                              }),
                1);
    }
  }
}

// A late rank, not a lost one: the wait is there, met. How long is long enough for the others to
// have nothing else to do depends on the machine, so the delay grows.
TEST(Trace, ShowsAWaitThatWasMet) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  bool found = false;
  for (int ms = 10; ms < 10000 && !found; ms *= 3) {
    RunOptions options = options_of("workers=1", 2);
    options.before_task = [ms](const TaskInfo& task) {
      if (task.rank == 1 && task.role == Role::send) {
        std::this_thread::sleep_for(std::chrono::milliseconds(ms));
      }
    };
    for (const TraceEvent& event : traced_run(data, options).events) {
      found |= event.kind == TraceKind::wait && event.rank == 0 && event.failed == 0 &&
               event.signal == Signal::row_ready && event.peer == 1 && event.awaited == 1 &&
               event.seen == 1 && event.role == Role::fanout && event.expert >= 0;
    }
  }
  EXPECT_TRUE(found);
}

TEST(Trace, MarksTheTaskThatFailed) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  for (const bool processes : {false, true}) {
    RunOptions options = options_of("workers=2", 3);
    options.processes = processes;
    options.before_task = [](const TaskInfo& task) {
      if (task.rank == 1 && task.role == Role::dgrad1) throw Error(ErrorCode::world, "broken");
    };
    Trace trace;
    options.trace = &trace;
    EXPECT_THROW(static_cast<void>(run_case(data, options)), Error);
    int failed_tasks = 0, forwards = 0;
    for (const TraceEvent& event : trace.events) {
      if (event.kind == TraceKind::operation && event.pass == Pass::forward) ++forwards;
      if (event.kind != TraceKind::task || event.failed == 0) continue;
      ++failed_tasks;
      EXPECT_EQ(event.rank, 1);
      EXPECT_EQ(event.role, Role::dgrad1);
      EXPECT_EQ(event.pass, Pass::backward);
    }
    EXPECT_GE(failed_tasks, 1);
    EXPECT_EQ(forwards, 3);  // each once
  }
}

TEST(Trace, IsOfTheLastRound) {
  const Case data = random_case({.tokens = 24}, DType::f32);
  RunOptions options = options_of("workers=2", 2);
  const auto count = [](const Trace& trace, TraceKind kind) {
    return std::count_if(trace.events.begin(), trace.events.end(),
                         [kind](const TraceEvent& event) { return event.kind == kind; });
  };
  const Trace once = traced_run(data, options);
  options.repeats = 3;
  const Trace last = traced_run(data, options);
  EXPECT_EQ(count(last, TraceKind::operation), 4);
  EXPECT_EQ(count(last, TraceKind::task), count(once, TraceKind::task));
}

TEST(Trace, KeepsTheEndWhereItsRingIsFull) {
  const Case data = random_case({.tokens = 40}, DType::f32);
  RunOptions options = options_of("workers=1,tile_m=8,chunk=1", 2);
  options.trace_capacity = 8;
  const Trace trace = traced_run(data, options);
  EXPECT_GT(trace.dropped, 0);
  EXPECT_EQ(trace.events.size(), 2U * 2 * 8);  // ranks, passes, records
  int operations = 0;
  for (const TraceEvent& event : trace.events) {
    if (event.kind == TraceKind::operation) ++operations;
  }
  EXPECT_EQ(operations, 4);
}

TEST(Trace, RefusesACapacityItCannotServe) {
  const Case data = random_case({.tokens = 8}, DType::f32);
  for (const std::int64_t capacity :
       {std::int64_t{-1}, std::int64_t{0}, (std::int64_t{1} << 24) + 1}) {
    RunOptions options = options_of("workers=1", 2);
    options.trace_capacity = capacity;
    EXPECT_NO_THROW(static_cast<void>(run_case(data, options)));  // not asked for
    try {
      static_cast<void>(traced_run(data, options));
      ADD_FAILURE() << "no error for " << capacity;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      EXPECT_EQ(std::string(error.what()),
                fmt::format("trace_capacity is {} records; it must be 1 to 16777216", capacity));
    }
  }
}

TEST(Trace, ChangesNoBits) {
  const Case data = random_case({.tokens = 40}, DType::bf16);
  const CaseResult expected = run_case_sequential(data, true);
  for (const std::string& text : kSchedules) {
    Trace trace;
    RunOptions options = options_of(text, 3);
    options.trace = &trace;
    expect_equal(data, expected, run_case(data, options), text);
  }
}

TEST(Trace, OfAPublicLayerIsOfItsLastOperation) {
  for (const bool on : {false, true}) {
    GroupOptions options;
    options.num_ranks = 1;
    options.num_experts = 2;
    options.topk = 1;
    options.hidden = 8;
    options.ffn = 8;
    options.max_tokens_per_rank = 2;
    options.dtype = DType::f32;
    options.trace = on;
    Group group(options);
    Layer layer(group, 0);
    EXPECT_TRUE(layer.trace().events.empty());
    const std::vector<float> x(16, 1.0F), w1(2 * 16 * 8, 0.1F), w2(2 * 8 * 8, 0.1F);
    const std::vector<std::int32_t> ids{0, 1};
    const std::vector<float> weights{1.0F, 1.0F};
    std::vector<float> out(16), d_x(16), d_weights(2), d_w1(w1.size()), d_w2(w2.size());
    const Saved saved = layer.forward({.x = std::as_bytes(std::span(x)),
                                       .topk_ids = ids,
                                       .topk_weights = weights,
                                       .w1 = std::as_bytes(std::span(w1)),
                                       .w2 = std::as_bytes(std::span(w2)),
                                       .out = std::as_writable_bytes(std::span(out))});
    const auto passes = [&] {
      std::set<Pass> all;
      for (const TraceEvent& event : layer.trace().events) all.insert(event.pass);
      return all;
    };
    EXPECT_EQ(passes(), on ? std::set<Pass>{Pass::forward} : std::set<Pass>{});
    layer.backward(saved, {.d_out = std::as_bytes(std::span(x)),
                           .w1 = std::as_bytes(std::span(w1)),
                           .w2 = std::as_bytes(std::span(w2)),
                           .d_x = std::as_writable_bytes(std::span(d_x)),
                           .d_topk_weights = d_weights,
                           .d_w1 = d_w1,
                           .d_w2 = d_w2});
    EXPECT_EQ(passes(), on ? std::set<Pass>{Pass::backward} : std::set<Pass>{});
  }
}

}  // namespace
}  // namespace uniep::test
