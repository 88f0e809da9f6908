// SPDX-License-Identifier: Apache-2.0
// What the workers of a rank do, and when they did it.
#pragma once

#include <cstdint>

#include "uniep/export.h"

namespace uniep {

enum class Role {
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
};
[[nodiscard]] UNIEP_API const char* to_string(Role role);

struct TaskInfo {
  int rank = 0;
  int worker = 0;
  Role role = Role::send;
  std::int64_t index = 0;  // token chunk, row tile or local expert
};

struct TraceEvent {
  TaskInfo task;
  std::int64_t start_ns = 0;  // steady clock
  std::int64_t end_ns = 0;
};

}  // namespace uniep
