// SPDX-License-Identifier: Apache-2.0
// One rank's view of the expert layer on the CPU: forward and backward over a Group. All ranks of a
// group call the same operations in the same order, each from its own thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/formulas.hpp"
#include "cpu/gemm.hpp"
#include "cpu/group.hpp"
#include "cpu/recorder.hpp"
#include "plan/plan.hpp"

namespace uniep::cpu {

// Where a row came from.
struct RowOrigin {
  std::int32_t rank = -1;          // -1 in padding
  std::int32_t token_choice = -1;  // token * topk + choice at that rank
};

// What backward needs of a forward; several may be alive at once. Rows are expert-major.
template <typename S>
struct Saved {
  Plan plan;
  std::int64_t ffn = 0;
  std::vector<std::int32_t> topk_ids;  // [num_tokens, topk]
  std::vector<RowOrigin> origins;      // [padded_rows]
  std::vector<float> weights;          // [padded_rows] topk weight of each row
  std::vector<S> x_rows;               // [padded_rows, hidden], padding is zero
  std::vector<S> h;                    // [padded_rows, 2 * ffn], padding is zero
};

template <typename S>
struct ForwardInput {
  std::int64_t ffn = 0;
  std::span<const S> x;                    // [num_tokens, hidden]
  std::span<const std::int32_t> topk_ids;  // [num_tokens, topk]
  std::span<const float> topk_weights;     // [num_tokens, topk]
  std::span<const S> w1;                   // [num_local_experts, 2 * ffn, hidden]
  std::span<const S> w2;                   // [num_local_experts, hidden, ffn]
  std::span<S> out;                        // [num_tokens, hidden], written
};

template <typename S>
struct BackwardInput {
  std::span<const S> d_out;  // [num_tokens, hidden]
  std::span<const S> w1;
  std::span<const S> w2;
  std::span<S> d_x;                 // [num_tokens, hidden], written
  std::span<float> d_topk_weights;  // [num_tokens, topk], written; masked = 0
  std::span<float> d_w1;            // like w1
  std::span<float> d_w2;            // like w2
  bool accumulate = false;  // add the finished gradients to d_w1 and d_w2 (main_grad) once; experts
                            // without rows are then left untouched
};

template <typename S>
class RankLayer {
 public:
  // Errors: invalid_argument for a rank outside the group, one that has a layer already, or a group
  // of another element size. A later layer of the same rank goes on where this one ended.
  RankLayer(Group& group, int rank);
  ~RankLayer();
  RankLayer(const RankLayer&) = delete;
  RankLayer& operator=(const RankLayer&) = delete;

  // Errors: invalid_argument for spans that disagree with the shape; world for a lost peer, an
  // expired wait or missing memory. An error poisons the group: peers end with its sentence.
  [[nodiscard]] Saved<S> forward(const ForwardInput<S>& input);
  void backward(const Saved<S>& saved, const BackwardInput<S>& input);

  // Collective, after an error on any rank: the next operation works again.
  void recover();

  // What was recorded of the last operation, also of one that failed.
  [[nodiscard]] Trace trace() const { return recorder_.trace(); }

 private:
  struct Operation;
  void publish(std::span<const std::int32_t> topk_ids, std::span<const float> topk_weights,
               std::int64_t num_tokens, std::int64_t operation);
  void wait_for_peers(std::int64_t num_tokens, std::int64_t operation);
  void begin_operation(std::int64_t operation);
  void wait_until_consumed(std::int64_t operation);
  void end_operation();
  template <typename Body>
  auto guarded(Body body);

  Group& group_;
  int rank_;
  RankEpochs& epochs_;
  Recorder recorder_;
};

extern template class RankLayer<float>;
extern template class RankLayer<Bf16>;

}  // namespace uniep::cpu
