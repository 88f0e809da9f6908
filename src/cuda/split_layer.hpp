// SPDX-License-Identifier: Apache-2.0
// The expert layer on the GPU. Split: one kernel after the other, plan, dispatch, gemm1,
// activation, gemm2, combine, and back; it is what fused kernels must equal bit for bit. Fused: a
// forward is plan, {dispatch, gemm1, activation}, {gemm2, combine}. No call here waits for the GPU;
// without rows from the host's side it can be captured in a CUDA graph.
//
// One launch of a moving kernel runs all ranks that are given together: with virtual ranks all of
// them, with a GPU for each only one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "cuda/device_memory.hpp"
#include "cuda/fused_args.hpp"
#include "cuda/plan.hpp"
#include "cuda/split_args.hpp"
#include "uniep/dtype.hpp"
#include "uniep/schedule.hpp"

namespace uniep::cuda {

// How products are computed; a numeric class of its own each.
enum class GemmEngine {
  tensor_cores,  // bf16: chains of k16 steps of WGMMA
  fma,           // f32 or bf16: chains of fma
};

struct LayerShape {
  int topk = 1;
  std::int64_t hidden = 0;
  std::int64_t ffn = 0;
  std::int64_t max_tokens = 0;  // per rank
  DType dtype = DType::bf16;
  GemmEngine gemm = GemmEngine::tensor_cores;
};

// Changes no bits. The same on every rank.
struct SplitSchedule {
  Fusion fusion = Fusion::split;  // of the forward; fused needs tensor cores and pushes both ways
  Payload payload = Payload::rank;
  Direction dispatch = Direction::push;
  Direction combine = Direction::push;
  int blocks_per_rank = 16;  // of the plan, dispatch and combine, 1 to 32
  // Of a dispatch block's 16, 1 to 15; the others fan out. Fused: of 12, 1 to 11, and pushers that
  // are done fan out too.
  int push_warps = 8;
  int chunk = 8;    // tokens that are signalled together, 1 to 4096; fused: (token, choice) pairs
  int num_sms = 0;  // for products and activation; 0: all
};

// Device memory, row-major, of the layer's dtype where not said otherwise; rows start on 16 bytes.
// E_l are the rank's local experts.
struct ForwardTensors {
  std::int64_t num_tokens = 0;
  const void* x = nullptr;                 // [num_tokens, hidden]
  const std::int32_t* topk_ids = nullptr;  // [num_tokens, topk]; -1 is masked
  const float* topk_weights = nullptr;     // [num_tokens, topk]
  const void* w1 = nullptr;                // [E_l, 2 * ffn, hidden], gate rows first
  const void* w2 = nullptr;                // [E_l, hidden, ffn]
  void* out = nullptr;                     // [num_tokens, hidden], written
};

struct BackwardTensors {
  const void* d_out = nullptr;  // [num_tokens, hidden]
  const void* w1 = nullptr;
  const void* w2 = nullptr;
  void* d_x = nullptr;              // [num_tokens, hidden], written
  float* d_topk_weights = nullptr;  // [num_tokens, topk], written; 0 where masked
  float* d_w1 = nullptr;            // [E_l, 2 * ffn, hidden] f32
  float* d_w2 = nullptr;            // [E_l, hidden, ffn] f32
  // False: d_w1 and d_w2 are written, zeros for experts without rows. True: the finished gradients
  // are added once, and experts without rows are left untouched.
  bool accumulate = false;
};

class SplitLayer {
 public:
  // What a backward needs of its forward, in device memory; several may be alive at once. Keep it
  // until the backward's kernels have ended, and no longer than the layer.
  class Saved {
   public:
    Saved() = default;
    Saved(Saved&&) noexcept = default;
    Saved& operator=(Saved&&) noexcept = default;

   private:
    friend class SplitLayer;
    struct Rank {
      std::int64_t num_tokens = 0;
      DeviceArray<std::byte> x_rows;  // [max_rows, hidden]
      DeviceArray<std::byte> h;       // [max_rows, 2 * ffn]
      DeviceArray<float> weights;     // [max_rows]
    };
    const SplitLayer* layer = nullptr;
    std::unique_ptr<DevicePlan> plan;
    std::vector<Rank> ranks;
  };

  // Symmetric memory that a rank's part must hold. Errors: as the constructor's.
  [[nodiscard]] static std::int64_t bytes_per_rank(const LayerShape& shape,
                                                   const SplitSchedule& schedule,
                                                   const Placement& placement);

  // `memory` must outlive the layer. Ranks first_rank, … first_rank + num_local_ranks - 1 are
  // those that this process launches. Errors: invalid_argument names the value and what is valid;
  // world if memory or a GPU is not there.
  SplitLayer(const SymmetricMemory& memory, const LayerShape& shape, const SplitSchedule& schedule,
             const Placement& placement, int first_rank, int num_local_ranks);
  SplitLayer(const SplitLayer&) = delete;
  SplitLayer& operator=(const SplitLayer&) = delete;

  // Asynchronous in `stream`, the same for all operations of a layer. One entry for each local
  // rank. All ranks of the group issue the same operations in the same order. Errors:
  // invalid_argument before anything is launched; world if CUDA refuses.
  [[nodiscard]] Saved forward(std::span<const ForwardTensors> ranks, cudaStream_t stream);
  void backward(const Saved& saved, std::span<const BackwardTensors> ranks, cudaStream_t stream);

  // Waits for `stream`. Errors: as DevicePlan::check. After invalid_argument no output was written
  // and the next operation works; after world, SymmetricMemory::recover comes first.
  void check(const Saved& saved, cudaStream_t stream) const;

  // Gives memory back to the next forward, which otherwise takes new memory and waits for the GPU.
  void release(Saved saved) { spare_.push_back(std::move(saved)); }

  // For timing: called on the host before the launches of each stage (plan, dispatch, products,
  // combine, wgrad) and, with "end", after the last.
  void set_observer(std::function<void(const char* stage)> observer) {
    observer_ = std::move(observer);
  }

 private:
  struct Product;
  void begin(const char* stage) const {
    if (observer_) observer_(stage);
  }
  [[nodiscard]] Saved take_saved();
  [[nodiscard]] MoveShape move_shape() const;
  void dispatch(std::span<const DispatchRank> ranks, cudaStream_t stream) const;
  void combine(std::span<const CombineRank> ranks, cudaStream_t stream) const;
  void multiply(const Saved& saved, int local, const Product& product, cudaStream_t stream) const;
  [[nodiscard]] KernelArgs kernel_args(const Saved& saved, int local, const Product& product) const;
  [[nodiscard]] Product gemm1(const Saved& saved, int local, const ForwardTensors& t) const;
  [[nodiscard]] Product gemm2(int local, const ForwardTensors& t) const;
  void check_fused() const;
  void run_fused(const Saved& saved, std::span<const ForwardTensors> tensors,
                 std::span<const DispatchRank> sends, std::span<const CombineRank> returns,
                 cudaStream_t stream) const;
  [[nodiscard]] FusedWords fused_words(int local) const;
  [[nodiscard]] FusedShape fused_shape() const;
  [[nodiscard]] ActivationArgs activation_args(const Saved& saved, int local) const;
  [[nodiscard]] const PlanArrays& plan_of(const Saved& saved, int local) const {
    return saved.plan->arrays(first_rank_ + local);
  }
  [[nodiscard]] int experts_of(int local) const {
    return placement_.num_local_experts(first_rank_ + local);
  }
  // Where products of the last stage go: where peers read them, or private memory.
  [[nodiscard]] std::byte* y_rows(int local) const;
  [[nodiscard]] float* d_weight_rows(int local) const;

  const SymmetricMemory& memory_;
  LayerShape shape_;
  SplitSchedule schedule_;
  Placement placement_;
  int first_rank_;
  int num_local_ranks_;
  SplitRegions regions_{};
  std::int64_t element_bytes_;
  std::int64_t max_rows_;  // of any rank, a multiple of 64
  int gemm_blocks_ = 0;
  std::vector<DeviceArray<std::byte>> y_, a_, d_rows_, d_h_;  // [local ranks]
  std::vector<DeviceArray<float>> d_a_, d_weights_;           // [local ranks]
  DeviceArray<std::uint32_t> tickets_;                        // [local ranks]
  DeviceArray<std::uint64_t> fused_words_;  // [local ranks] words of each, see FusedWords
  std::vector<Saved> spare_;
  std::function<void(const char* stage)> observer_;
};

}  // namespace uniep::cuda
