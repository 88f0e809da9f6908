// SPDX-License-Identifier: Apache-2.0
// A case: the global input of one layer, for all ranks, rank-major, as it stands in a tensor file
// (safetensors). Dump one from a training step, and run it anywhere with any ranks and schedule.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "uniep/dtype.hpp"
#include "uniep/export.h"
#include "uniep/job.hpp"
#include "uniep/schedule.hpp"
#include "uniep/trace.hpp"

namespace uniep {

// x, w1, w2 and d_out hold values of `dtype`, row-major.
struct Case {
  DType dtype = DType::bf16;  // bf16 or f32
  std::int64_t num_tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t num_experts = 0;
  std::int64_t topk = 0;
  std::vector<std::int64_t> tokens_per_rank;    // [R]; empty where the file leaves the split open
  std::vector<std::byte> x;                     // [num_tokens, hidden]
  std::vector<std::int32_t> topk_ids;           // [num_tokens, topk], -1 = masked
  std::vector<float> topk_weights;              // [num_tokens, topk], anything where masked
  std::vector<std::byte> w1;                    // [num_experts, 2*ffn, hidden], gate rows first
  std::vector<std::byte> w2;                    // [num_experts, hidden, ffn]
  std::optional<std::vector<std::byte>> d_out;  // [num_tokens, hidden]
};

// Errors: invalid_argument for a file that is absent or malformed and for tensors that are missing
// or disagree; world for a failed read or too little memory. Tensors of other names are ignored.
// Non-finite values are data: whoever hunts a bad step must be able to replay it.
[[nodiscard]] UNIEP_API Case load_case(const std::string& path);

// The file appears under its name complete or not at all.
UNIEP_API void save_case(const std::string& path, const Case& data);

struct CaseResult {
  std::vector<std::byte> out;         // [num_tokens, hidden] in the case's dtype
  std::vector<std::byte> d_x;         // [num_tokens, hidden] in the case's dtype
  std::vector<float> d_topk_weights;  // [num_tokens, topk]
  std::vector<float> d_w1;            // [num_experts, 2 * ffn, hidden]
  std::vector<float> d_w2;            // [num_experts, hidden, ffn]
};

struct RunOptions {
  int num_ranks = 1;
  Schedule schedule;
  bool backward = false;  // needs the case's d_out
  int repeats = 1;        // operations on the same group; the last one's results
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);
  // Called by the worker before each task; for tests: delays, and faults (it may throw Error).
  std::function<void(const TaskInfo&)> before_task;
  // Gets what all ranks did and waited for in the last round, forward, then backward; also when the
  // run fails, of the round that failed, but for ranks that died and ranks of other processes of a
  // job. Older events of a worker than the last trace_capacity of each operation are counted only.
  Trace* trace = nullptr;
  std::int64_t trace_capacity = kTraceCapacity;  // 1 to 2^24
  // Each rank in a process of its own, forked from this one, instead of in a thread. The caller
  // should have no other threads then. A rank that dies is named in the error of the others.
  bool processes = false;
  // This process is one rank of a job and calls with the same case and options as all others;
  // num_ranks must be the job's. Only its rank 0 gets results.
  std::optional<Job> job;
};

// Runs the layer on the CPU, each rank in a thread or process of its own with its own workers.
// Errors: invalid_argument where the case lacks d_out for a backward, the schedule cannot run or a
// job's ranks disagree; world for missing memory, a lost rank or a wait that expired.
[[nodiscard]] UNIEP_API CaseResult run_case(const Case& data, const RunOptions& options);

}  // namespace uniep
