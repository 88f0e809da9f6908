// SPDX-License-Identifier: Apache-2.0
// The expert layer of a Mixture-of-Experts model over the ranks of one group, on the CPU.
//
// A rank is a thread of this process: each makes a Layer on the shared Group, and all of them call
// the same operations in the same order. Or it is a process of a job, GroupOptions::job. For token
// t with choices j of expert e = topk_ids[t, j]:
//   h = x[t] · w1[e]ᵀ        a = silu(h[0:F]) * h[F:2F] * topk_weights[t, j]
//   out[t] = Σ_j a · w2[e]ᵀ  (choices ascending)
// The bits of every result depend on the values alone, not on ranks, schedule or timing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "uniep/dtype.hpp"
#include "uniep/export.h"
#include "uniep/job.hpp"
#include "uniep/schedule.hpp"
#include "uniep/trace.hpp"

namespace uniep {

struct GroupOptions {
  int num_ranks = 1;                     // 1 to 1024
  int num_experts = 1;                   // E, over all ranks; any number, also below num_ranks
  int topk = 1;                          // k, 1 to 64
  std::int64_t hidden = 0;               // H, model width
  std::int64_t ffn = 0;                  // F, inner width of an expert
  std::int64_t max_tokens_per_rank = 0;  // sizes the symmetric heap
  DType dtype = DType::bf16;             // of x, w1, w2, out, d_out and d_x: bf16 or f32
  Schedule schedule;
  // [num_experts] owner of each expert; empty: contiguous, the first E mod R ranks own one more.
  std::vector<std::int32_t> rank_of_expert;
  std::chrono::nanoseconds wait_bound = std::chrono::seconds(30);  // of every wait
  bool trace = false;                            // record every operation, see Layer::trace
  std::int64_t trace_capacity = kTraceCapacity;  // records of a worker, 1 to 2^24; older ones go
  // Ranks as processes: this one is a rank of the job, see job_from_environment. Every process
  // makes the Group, with the same options but for the job's rank, and a Layer of its own rank.
  std::optional<Job> job;
};

// What the ranks share. Make one, and keep it alive longer than every Layer on it.
class UNIEP_API Group {
 public:
  // Errors: invalid_argument for sizes or a schedule that cannot run; world if memory is refused.
  // In a job collective: it waits for all ranks, within wait_bound; invalid_argument also where
  // their options differ, world also for ranks that do not come or are lost. A rank whose process
  // ends without destroying the group ends the others' operations with its number.
  explicit Group(const GroupOptions& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] const GroupOptions& options() const;
  // Global ids of a rank's experts, ascending: the order of its w1, w2, d_w1 and d_w2.
  [[nodiscard]] std::vector<std::int32_t> experts_of(int rank) const;
  // Symmetric memory of one rank, in bytes.
  [[nodiscard]] std::int64_t heap_bytes_per_rank() const;

 private:
  friend class Layer;
  struct State;
  std::unique_ptr<State> state_;
};

// One rank's tensors, row-major and contiguous; byte spans hold values of the group's dtype, see
// std::as_bytes. T is this rank's number of tokens, E_l that of its experts.
struct ForwardArgs {
  std::span<const std::byte> x;            // [T, H]
  std::span<const std::int32_t> topk_ids;  // [T, k] global expert ids, -1 = masked
  std::span<const float> topk_weights;     // [T, k]
  std::span<const std::byte> w1;           // [E_l, 2F, H], gate rows first
  std::span<const std::byte> w2;           // [E_l, H, F]
  std::span<std::byte> out;                // [T, H], written
};

struct BackwardArgs {
  std::span<const std::byte> d_out;  // [T, H]
  std::span<const std::byte> w1;     // as in the forward
  std::span<const std::byte> w2;
  std::span<std::byte> d_x;         // [T, H], written
  std::span<float> d_topk_weights;  // [T, k], written; 0 where masked
  std::span<float> d_w1;            // [E_l, 2F, H]
  std::span<float> d_w2;            // [E_l, H, F]
  // False: d_w1 and d_w2 are written, zeros for experts without rows. True: the finished gradients
  // are added to them once (fp32 main_grad), and experts without rows are left untouched.
  bool accumulate = false;
};

// What a backward needs of its forward. Several may be alive at once, used once or more.
class UNIEP_API Saved {
 public:
  Saved(Saved&&) noexcept;
  Saved& operator=(Saved&&) noexcept;
  ~Saved();

 private:
  friend class Layer;
  struct State;
  explicit Saved(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class UNIEP_API Layer {
 public:
  Layer(Group& group, int rank);
  ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // Collective. Errors: invalid_argument for sizes or ids that disagree with the group; world for a
  // lost peer, an expired wait or missing memory. An error on one rank ends the operation on all,
  // each with a sentence; afterwards every rank calls recover().
  [[nodiscard]] Saved forward(const ForwardArgs& args);
  void backward(const Saved& saved, const BackwardArgs& args);

  // Runs body, which makes the arguments of the next operation; what it throws ends that operation
  // on all ranks, as an error of the operation itself would.
  void prepare(const std::function<void()>& body);

  // Collective, after an error on any rank: the next operation works again.
  void recover();

  // What this rank's workers did and waited for in its last operation, also in one that failed,
  // where the group was made with trace; empty otherwise. Not while an operation runs.
  [[nodiscard]] Trace trace() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace uniep
