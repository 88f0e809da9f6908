// SPDX-License-Identifier: Apache-2.0
// What the workers of a rank do, when they did it, and what they waited for.
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "uniep/export.h"

namespace uniep {

enum class Role : std::uint8_t {
  send,          // moves a token chunk's rows to the ranks of their experts (push)
  pull,          // fetches the rows of a run from their source (pull)
  fanout,        // copies a row that arrived once to each of its experts
  gemm1,         // x · w1ᵀ of a row tile
  activation,    // SwiGLU times the topk weight
  gemm2,         // a · w2ᵀ of a row tile, sent home row by row
  dgrad2,        // d_y · w2 of a row tile
  d_activation,  // backward of SwiGLU and of the topk weight
  dgrad1,        // d_h · w1 of a row tile, sent home row by row
  wgrad2,        // d_yᵀ · a of a local expert
  wgrad1,        // d_hᵀ · x of a local expert
  reduce,        // adds the choices of a token chunk, ascending
  none,          // no task: in records of plans and operations, and of waits between tasks
};
[[nodiscard]] UNIEP_API const char* to_string(Role role);

struct TaskInfo {
  int rank = 0;
  int worker = 0;
  Role role = Role::send;
  std::int64_t index = 0;  // token chunk, row tile or local expert
};

enum class TraceKind : std::uint8_t {
  task,
  wait,
  plan,       // counts exchanged to tiles known
  operation,  // a whole forward or backward of a rank
};
[[nodiscard]] UNIEP_API const char* to_string(TraceKind kind);

enum class Pass : std::uint8_t { forward, backward };
[[nodiscard]] UNIEP_API const char* to_string(Pass pass);

// What a wait is for: the word that somebody raises when the thing is there.
enum class Signal : std::uint8_t {
  none,          // unknown: other workers were about to look at what was left
  consumed,      // a rank has read all of the operation before
  published,     // a rank's counts and ids
  send_ready,    // a row that its source offers to those who fetch it
  row_ready,     // a row in this rank's receive region
  tile_ready,    // a row tile, fanned out
  gemm1_done,    // all column tiles of a row tile's gemm1
  activated,     // a row tile's activation, where it is split from gemm1
  dgrad2_done,   // all column tiles of a row tile's dgrad2
  d_activated,   // a row tile's d_h and a
  return_ready,  // a result that came home
  phase_done,    // the tasks that other workers of this rank still run
};
[[nodiscard]] UNIEP_API const char* to_string(Signal signal);

// One record, the same from a CPU worker and from a block of a kernel: four stores of 16 bytes, no
// pointers, no padding. A field that does not apply to the kind has the value given here.
struct alignas(16) TraceEvent {
  std::int64_t start_ns = 0;  // steady clock; one clock for all ranks of a machine
  std::int64_t end_ns = 0;

  std::int64_t flops = 0;       // task: of a product, a multiply and an add count as two
  std::int64_t link_bytes = 0;  // task: rows put into or fetched from other ranks' memory

  std::uint32_t awaited = 0;  // wait: the value awaited, its low 32 bits
  std::uint32_t seen = 0;     // wait: the value when it ended
  std::int32_t index = -1;    // task: token chunk, row tile or local expert; wait: row tile or -1
  std::int32_t part = -1;     // task: column tile, or output tile of a weight gradient

  std::int32_t expert = -1;  // global id, of the row tile or the weight gradient
  std::int16_t rank = 0;
  std::int16_t worker = 0;  // thread of the rank, or block
  std::int16_t peer = -1;   // task: destination or source rank; wait: who raises the signal
  TraceKind kind = TraceKind::task;
  Pass pass = Pass::forward;
  Role role = Role::none;  // task: its own; wait: that of the task that waited
  Signal signal = Signal::none;
  std::uint8_t unit = 0;    // writing role inside a block; 0 on a CPU
  std::uint8_t failed = 0;  // 1: an error, or a wait's bound, ended it
};
static_assert(sizeof(TraceEvent) == 64 && std::is_trivially_copyable_v<TraceEvent>);

struct Trace {
  std::vector<TraceEvent> events;  // by operation, rank and worker; of a worker by their ends
  std::int64_t dropped = 0;        // the oldest of a worker, where there were more than it keeps
};

inline constexpr std::int64_t kTraceCapacity = std::int64_t{1} << 14;  // records of a worker: 1 MiB

}  // namespace uniep
