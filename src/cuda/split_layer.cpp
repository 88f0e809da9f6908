// SPDX-License-Identifier: Apache-2.0
// Checks, the layout of the symmetric memory, and the launches of an operation in their order.
#include "cuda/split_layer.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

#include "cuda/grouped_gemm.hpp"
#include "cuda/grouped_gemm_launch.hpp"

namespace uniep::cuda {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int64_t bytes_of(DType dtype) { return dtype == DType::bf16 ? 2 : 4; }

PlanShape plan_shape(const LayerShape& shape, const SplitSchedule& schedule) {
  return {.topk = shape.topk,
          .max_tokens = shape.max_tokens,
          .tile_m = 128,
          .blocks_per_rank = schedule.blocks_per_rank};
}

// Rows that any rank may get, padding included, whatever the routing.
std::int64_t rows_bound(const LayerShape& shape, const Placement& placement) {
  std::int64_t experts = 0;
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    experts = std::max<std::int64_t>(experts, placement.num_local_experts(rank));
  }
  const std::int64_t rows =
      placement.num_ranks * shape.max_tokens * shape.topk + experts * (kExpertRowAlignment - 1);
  return std::max(kExpertRowAlignment,
                  (rows + kExpertRowAlignment - 1) / kExpertRowAlignment * kExpertRowAlignment);
}

void check_range(const char* what, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value < least || value > most) {
    throw_invalid("{} is {}; {} to {} are valid", what, value, least, most);
  }
}

void check_shape(const LayerShape& shape, const SplitSchedule& schedule) {
  constexpr std::int64_t kMaxExtent = 1 << 24;
  if (shape.dtype != DType::bf16 && shape.dtype != DType::f32) {
    throw_invalid("the layer computes on bf16 and f32; another dtype was given");
  }
  check_range("hidden", shape.hidden, 1, kMaxExtent);
  check_range("ffn", shape.ffn, 1, kMaxExtent / 2);
  check_range("push_warps", schedule.push_warps, 1, kMoveWarps - 1);
  check_range("chunk", schedule.chunk, 1, 4096);
  check_range("num_sms", schedule.num_sms, 0, 1024);
  if (shape.gemm != GemmEngine::tensor_cores) return;
  if (shape.dtype != DType::bf16) {
    throw_invalid("tensor cores multiply bf16 here; f32 needs gemm=fma, which never is TF32");
  }
  for (const auto& [name, value] :
       {std::pair{"hidden", shape.hidden}, std::pair{"ffn", shape.ffn}}) {
    if (value % 8 != 0) {
      throw_invalid("{} is {}; on tensor cores it must be a multiple of 8", name, value);
    }
  }
}

// Signals of chunks from a rank to a peer. The fused forward cuts (token, choice) pairs in chunks,
// everything else tokens.
std::int64_t max_chunks(const LayerShape& shape, const SplitSchedule& schedule) {
  const std::int64_t pieces =
      schedule.fusion == Fusion::fused ? shape.max_tokens * shape.topk : shape.max_tokens;
  return (pieces + schedule.chunk - 1) / schedule.chunk;
}

SplitRegions place_regions(const LayerShape& shape, const SplitSchedule& schedule,
                           const Placement& placement, std::int64_t* bytes = nullptr) {
  Pieces pieces(DevicePlan::bytes_per_rank(plan_shape(shape, schedule), placement));
  const std::int64_t ranks = placement.num_ranks;
  const std::int64_t tokens = shape.max_tokens;
  const std::int64_t row = shape.hidden * bytes_of(shape.dtype);
  const std::int64_t rows = rows_bound(shape, placement);
  SplitRegions r{};
  r.tokens_ready = pieces.take(ranks, 8);
  r.num_tokens = pieces.take(ranks, 8);
  r.chunk_ready = pieces.take(ranks * max_chunks(shape, schedule), 8);
  r.returned = pieces.take(ranks * kMaxBlocksPerRank, 8);
  r.consumed = pieces.take(ranks * kMaxBlocksPerRank, 8);
  r.block_done = pieces.take(kMaxBlocksPerRank, 8);
  r.recv_slots = pieces.take(ranks * tokens * shape.topk, 4);
  r.recv_weights = pieces.take(ranks * tokens * shape.topk, 4);
  // A rank alone sends nothing.
  const bool is_alone = ranks == 1;
  const bool push = schedule.dispatch == Direction::push && !is_alone;
  const bool pull = schedule.dispatch == Direction::pull && !is_alone;
  const bool fused = schedule.fusion == Fusion::fused && !is_alone;
  r.recv_places = pieces.take(fused ? ranks * tokens * shape.topk : 0, 4);
  r.recv_rows = pieces.take(
      push ? ranks * tokens * (schedule.payload == Payload::choice ? shape.topk : 1) : 0, row);
  r.send_rows = pieces.take(pull ? tokens : 0, row);
  const bool pull_combine = schedule.combine == Direction::pull;
  const std::int64_t staged = pull_combine || is_alone ? 0 : tokens * shape.topk;
  r.staging = pieces.take(staged, row);
  r.d_weight_staging = pieces.take(staged, 4);
  r.y_rows = pieces.take(pull_combine ? rows : 0, row);
  r.d_weight_rows = pieces.take(pull_combine ? rows : 0, 4);
  if (bytes != nullptr) *bytes = pieces.bytes();
  return r;
}

// Why a fused forward cannot be, beside what every schedule needs.
void check_fusion(const LayerShape& shape, const SplitSchedule& schedule,
                  const Placement& placement) {
  if (schedule.fusion == Fusion::split) return;
  if (shape.gemm != GemmEngine::tensor_cores) {
    throw_invalid("fusion=fused needs tensor cores, and gemm is fma; fusion=split takes both");
  }
  if (schedule.dispatch == Direction::pull || schedule.combine == Direction::pull) {
    throw_invalid("fusion=fused pushes rows, and {} is pull; fusion=split takes both",
                  schedule.dispatch == Direction::pull ? "dispatch" : "combine");
  }
  check_range("push_warps of fusion=fused", schedule.push_warps, 1, kFusedWarps - 1);
  constexpr std::int64_t kMost = std::int64_t{1} << kCountShift;
  const std::int64_t chunks = max_chunks(shape, schedule) * placement.num_ranks;
  const std::int64_t warps = (std::int64_t{schedule.blocks_per_rank} + 1) * kFusedWarps;
  if (chunks + warps >= kMost) {
    throw_invalid(
        "{} chunks of {} (token, choice) pairs in a fused forward; fewer than {} are valid", chunks,
        schedule.chunk, kMost - warps);
  }
  const std::int64_t n_tiles = rows_bound(shape, placement) / kTileN + placement.num_experts();
  const std::int64_t tiles = n_tiles * (shape.hidden / kTileM + 2);
  if (2 * tiles >= kMost) {
    throw_invalid("up to {} tiles in a fused forward; fewer than {} are valid", tiles, kMost / 2);
  }
}

void check_tensor(int rank, const char* name, const void* pointer, bool is_empty) {
  if (is_empty) return;
  if (pointer == nullptr)
    throw_invalid("{} of rank {} is null; it must be device memory", name, rank);
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    throw_invalid("{} of rank {} is at {}; a multiple of 16 bytes is needed", name, rank, pointer);
  }
}

void check_count(std::size_t given, int num_local_ranks) {
  if (given != at(num_local_ranks)) {
    throw_invalid("tensors of {} ranks for a layer that launches {}; give one entry for each",
                  given, num_local_ranks);
  }
}

void check_launch(const char* what, cudaError_t error) {
  if (error != cudaSuccess) throw_world("{} did not launch: {}", what, cudaGetErrorString(error));
}

int count_sms() {
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) throw_world("no GPU for the layer: {}", cudaGetErrorString(error));
  return num_sms;
}

}  // namespace

// One product of a local rank, see GemmOp for who reads what.
struct SplitLayer::Product {
  GemmOp op;
  std::int64_t n;
  std::int64_t k;
  const void* x;
  const void* d_y;
  const void* w;
  void* out;
  bool is_f32;  // what is written
  bool accumulate = false;
};

std::int64_t SplitLayer::bytes_per_rank(const LayerShape& shape, const SplitSchedule& schedule,
                                        const Placement& placement) {
  check_shape(shape, schedule);
  check_fusion(shape, schedule, placement);
  std::int64_t bytes = 0;
  place_regions(shape, schedule, placement, &bytes);
  return bytes;
}

SplitLayer::SplitLayer(const SymmetricMemory& memory, const LayerShape& shape,
                       const SplitSchedule& schedule, const Placement& placement, int first_rank,
                       int num_local_ranks)
    : memory_(memory),
      shape_(shape),
      schedule_(schedule),
      placement_(placement),
      first_rank_(first_rank),
      num_local_ranks_(num_local_ranks),
      element_bytes_(bytes_of(shape.dtype)),
      max_rows_(0) {
  const std::int64_t bytes = bytes_per_rank(shape, schedule, placement);
  if (placement.num_ranks != memory.num_ranks()) {
    throw_invalid("the placement has {} ranks and the symmetric memory {}; they must agree",
                  placement.num_ranks, memory.num_ranks());
  }
  if (bytes > memory.bytes_per_rank()) {
    throw_invalid("the layer needs {} bytes of a rank's symmetric memory, which has {}", bytes,
                  memory.bytes_per_rank());
  }
  if (first_rank < 0 || num_local_ranks < 1 || num_local_ranks > placement.num_ranks - first_rank) {
    throw_invalid("{} ranks from rank {} in one layer; the group has ranks 0 to {}",
                  num_local_ranks, first_rank, placement.num_ranks - 1);
  }
  int dispatch_blocks = 0, combine_blocks = 0;
  cudaError_t error = count_resident_dispatch_blocks(&dispatch_blocks);
  if (error == cudaSuccess) error = count_resident_combine_blocks(&combine_blocks);
  if (error != cudaSuccess) {
    throw_world("the layer's kernels cannot run here: {}", cudaGetErrorString(error));
  }
  const int blocks = num_local_ranks * schedule.blocks_per_rank;
  if (blocks > std::min(dispatch_blocks, combine_blocks)) {
    throw_world(
        "{} ranks with {} blocks each need {} blocks resident at once, and this GPU holds {}; use "
        "fewer blocks per rank",
        num_local_ranks, schedule.blocks_per_rank, blocks,
        std::min(dispatch_blocks, combine_blocks));
  }
  max_rows_ = rows_bound(shape, placement);
  regions_ = place_regions(shape, schedule, placement);
  gemm_blocks_ = schedule.num_sms == 0 ? count_sms() : schedule.num_sms;
  if (schedule.fusion == Fusion::fused) check_fused();
  const bool private_y = schedule.combine == Direction::push;
  for (int local = 0; local < num_local_ranks; ++local) {
    const auto rows_of = [&](std::int64_t width, const char* what) {
      return DeviceArray<std::byte>(max_rows_ * width * element_bytes_, what);
    };
    y_.push_back(private_y ? rows_of(shape.hidden, "result rows") : DeviceArray<std::byte>());
    a_.push_back(rows_of(shape.ffn, "activations"));
    d_rows_.push_back(rows_of(shape.hidden, "gradient rows"));
    d_h_.push_back(rows_of(2 * shape.ffn, "gradients of h"));
    d_a_.emplace_back(max_rows_ * shape.ffn, "gradients of activations");
    d_weights_.emplace_back(private_y ? max_rows_ : 0, "gradients of weights");
  }
  tickets_ = DeviceArray<std::uint32_t>(num_local_ranks, "tickets");
  error = cudaMemset(tickets_.get(), 0, at(4 * num_local_ranks));
  if (error == cudaSuccess && schedule.fusion == Fusion::fused) {
    fused_words_ = DeviceArray<std::uint64_t>(
        num_local_ranks * (max_rows_ / kRowGroup + kFusedCounts), "words of arrival");
    error = cudaMemset(fused_words_.get(), 0, at(8 * fused_words_.count()));
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    throw_world("the layer's memory cannot be written: {}", cudaGetErrorString(error));
  }
}

SplitLayer::Saved SplitLayer::take_saved() {
  if (!spare_.empty()) {
    Saved saved = std::move(spare_.back());
    spare_.pop_back();
    return saved;
  }
  Saved saved;
  saved.layer = this;
  saved.plan = std::make_unique<DevicePlan>(memory_, plan_shape(shape_, schedule_), placement_,
                                            std::span<const std::vector<std::int32_t>>{},
                                            RankRange{first_rank_, num_local_ranks_});
  for (int local = 0; local < num_local_ranks_; ++local) {
    saved.ranks.push_back(
        {.num_tokens = 0,
         .x_rows = {max_rows_ * shape_.hidden * element_bytes_, "dispatched rows"},
         .h = {max_rows_ * 2 * shape_.ffn * element_bytes_, "h"},
         .weights = {max_rows_, "weights of rows"}});
  }
  return saved;
}

MoveShape SplitLayer::move_shape() const {
  return {.group = memory_.view(),
          .regions = regions_,
          .row_bytes = shape_.hidden * element_bytes_,
          .max_tokens = shape_.max_tokens,
          .topk = shape_.topk,
          .chunk = schedule_.chunk,
          .max_chunks = static_cast<std::int32_t>(max_chunks(shape_, schedule_)),
          .first_rank = first_rank_,
          .blocks_per_rank = schedule_.blocks_per_rank,
          .element_bytes = static_cast<std::int32_t>(element_bytes_),
          .per_choice = schedule_.payload == Payload::choice,
          .pull_dispatch = schedule_.dispatch == Direction::pull,
          .pull_combine = schedule_.combine == Direction::pull,
          .push_warps = schedule_.push_warps};
}

std::byte* SplitLayer::y_rows(int local) const {
  if (schedule_.combine == Direction::push) return y_[at(local)].get();
  return memory_.view().parts[first_rank_ + local] + regions_.y_rows;
}

float* SplitLayer::d_weight_rows(int local) const {
  if (schedule_.combine == Direction::push) return d_weights_[at(local)].get();
  return reinterpret_cast<float*>(memory_.view().parts[first_rank_ + local] +
                                  regions_.d_weight_rows);
}

void SplitLayer::dispatch(std::span<const DispatchRank> ranks, cudaStream_t stream) const {
  DispatchArgs args{};
  args.shape = move_shape();
  std::copy(ranks.begin(), ranks.end(), args.ranks);
  check_launch("dispatch", launch_dispatch(args, num_local_ranks_, stream));
}

void SplitLayer::combine(std::span<const CombineRank> ranks, cudaStream_t stream) const {
  CombineArgs args{};
  args.shape = move_shape();
  std::copy(ranks.begin(), ranks.end(), args.ranks);
  check_launch("combine", launch_combine(args, num_local_ranks_, stream));
}

KernelArgs SplitLayer::kernel_args(const Saved& saved, int local, const Product& product) const {
  if (experts_of(local) == 0) {  // no tile, but the fused kernel's movers draw once
    KernelArgs none{};
    none.tickets = tickets_.get() + local;
    return none;
  }
  const PlanArrays& plan = plan_of(saved, local);
  const bool with_activation = product.op == GemmOp::fprop_swiglu;
  const GroupedGemm problem{
      .n = product.n,
      .k = product.k,
      .x = product.x,
      .d_y = product.d_y,
      .w = product.w,
      .out = product.out,
      .h = with_activation ? saved.ranks[at(local)].h.get() : nullptr,
      .row_weights = with_activation ? saved.ranks[at(local)].weights.get() : nullptr,
      .accumulate = product.accumulate};
  return make_kernel_args(product.op, ElementType::bf16,
                          product.is_f32 ? ElementType::f32 : ElementType::bf16,
                          {.starts = plan.expert_starts,
                           .rows = plan.expert_rows,
                           .num_experts = experts_of(local),
                           .capacity = max_rows_},
                          {&problem, 1}, GemmLaunch{}.band, tickets_.get() + local);
}

void SplitLayer::multiply(const Saved& saved, int local, const Product& product,
                          cudaStream_t stream) const {
  const PlanArrays& plan = plan_of(saved, local);
  const int experts = experts_of(local);
  if (experts == 0) return;
  if (shape_.gemm == GemmEngine::tensor_cores) {
    launch_grouped_gemm(product.op, product.is_f32 ? ElementType::f32 : ElementType::bf16,
                        kernel_args(saved, local, product), count_gemm_blocks(schedule_.num_sms),
                        stream);
    return;
  }
  const bool is_wgrad = product.op == GemmOp::wgrad;
  const PlainGemmArgs args{
      .expert_starts = plan.expert_starts,
      .expert_rows = plan.expert_rows,
      .counts = plan.counts,
      .left = product.op == GemmOp::fprop ? product.x : product.d_y,
      .right = is_wgrad ? product.x : product.w,
      .out = product.out,
      .n = product.n,
      .k = product.k,
      .op = product.op == GemmOp::fprop ? PlainGemm::fprop
            : is_wgrad                  ? PlainGemm::wgrad
                                        : PlainGemm::dgrad,
      .experts = experts,
      .element_bytes = static_cast<std::int32_t>(element_bytes_),
      .out_bytes = product.is_f32 ? 4 : static_cast<std::int32_t>(element_bytes_),
      .accumulate = product.accumulate,
      .blocks = gemm_blocks_};
  check_launch("a product", launch_plain_gemm(args, stream));
}

ActivationArgs SplitLayer::activation_args(const Saved& saved, int local) const {
  const PlanArrays& plan = plan_of(saved, local);
  const Saved::Rank& rank = saved.ranks[at(local)];
  return {.expert_starts = plan.expert_starts,
          .expert_rows = plan.expert_rows,
          .counts = plan.counts,
          .row_sources = plan.row_sources,
          .h = rank.h.get(),
          .weights = rank.weights.get(),
          .a = a_[at(local)].get(),
          .d_a = d_a_[at(local)].get(),
          .d_h = d_h_[at(local)].get(),
          .d_weight_rows = d_weight_rows(local),
          .ffn = shape_.ffn,
          .experts = experts_of(local),
          .element_bytes = static_cast<std::int32_t>(element_bytes_),
          .blocks = gemm_blocks_};
}

SplitLayer::Saved SplitLayer::forward(std::span<const ForwardTensors> ranks, cudaStream_t stream) {
  check_count(ranks.size(), num_local_ranks_);
  std::vector<RankTopk> topk;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const ForwardTensors& t = ranks[at(local)];
    const int rank = first_rank_ + local;
    if (t.num_tokens < 0 || t.num_tokens > shape_.max_tokens) {
      throw_invalid("rank {} has {} tokens; 0 to {} are valid", rank, t.num_tokens,
                    shape_.max_tokens);
    }
    const bool is_empty = t.num_tokens == 0;
    check_tensor(rank, "x", t.x, is_empty);
    check_tensor(rank, "topk_ids", t.topk_ids, is_empty);
    check_tensor(rank, "topk_weights", t.topk_weights, is_empty);
    check_tensor(rank, "out", t.out, is_empty);
    check_tensor(rank, "w1", t.w1, experts_of(local) == 0);
    check_tensor(rank, "w2", t.w2, experts_of(local) == 0);
    topk.push_back({t.topk_ids, t.num_tokens});
  }
  Saved saved = take_saved();
  begin("plan");
  saved.plan->run(topk, stream, first_rank_);
  std::vector<DispatchRank> sends;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const ForwardTensors& t = ranks[at(local)];
    Saved::Rank& rank = saved.ranks[at(local)];
    rank.num_tokens = t.num_tokens;
    sends.push_back({.plan = plan_of(saved, local),
                     .rows = static_cast<const std::byte*>(t.x),
                     .topk_weights = t.topk_weights,
                     .num_tokens = t.num_tokens,
                     .rows_out = rank.x_rows.get(),
                     .weights_out = rank.weights.get(),
                     .experts = experts_of(local)});
  }
  std::vector<CombineRank> returns;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const ForwardTensors& t = ranks[at(local)];
    returns.push_back({.plan = plan_of(saved, local),
                       .y_rows = y_rows(local),
                       .d_weight_rows = nullptr,
                       .num_tokens = t.num_tokens,
                       .out = static_cast<std::byte*>(t.out),
                       .d_topk_weights = nullptr,
                       .experts = experts_of(local)});
  }
  std::vector<Product> first, second;
  for (int local = 0; local < num_local_ranks_; ++local) {
    first.push_back(gemm1(saved, local, ranks[at(local)]));
    second.push_back(gemm2(local, ranks[at(local)]));
  }
  if (schedule_.fusion == Fusion::fused) {
    begin("fused dispatch");
    fused_dispatch(Pass::forward, saved, sends, first, stream);
    begin("fused combine");
    fused_combine(Pass::forward, saved, second, returns, stream);
    begin("end");
    return saved;
  }
  begin("dispatch");
  dispatch(sends, stream);
  begin("products");
  for (int local = 0; local < num_local_ranks_; ++local) {
    multiply(saved, local, first[at(local)], stream);
    if (shape_.gemm != GemmEngine::tensor_cores) {
      check_launch("activation", launch_activation(activation_args(saved, local), stream));
    }
    multiply(saved, local, second[at(local)], stream);
  }
  begin("combine");
  combine(returns, stream);
  begin("end");
  return saved;
}

SplitLayer::Product SplitLayer::gemm1(const Saved& saved, int local,
                                      const ForwardTensors& t) const {
  const Saved::Rank& rank = saved.ranks[at(local)];
  const bool with_activation = shape_.gemm == GemmEngine::tensor_cores;
  return {.op = with_activation ? GemmOp::fprop_swiglu : GemmOp::fprop,
          .n = 2 * shape_.ffn,
          .k = shape_.hidden,
          .x = rank.x_rows.get(),
          .d_y = nullptr,
          .w = t.w1,
          .out = with_activation ? a_[at(local)].get() : rank.h.get(),
          .is_f32 = shape_.dtype == DType::f32};
}

SplitLayer::Product SplitLayer::gemm2(int local, const ForwardTensors& t) const {
  return {.op = GemmOp::fprop,
          .n = shape_.hidden,
          .k = shape_.ffn,
          .x = a_[at(local)].get(),
          .d_y = nullptr,
          .w = t.w2,
          .out = y_rows(local),
          .is_f32 = shape_.dtype == DType::f32};
}

FusedWords SplitLayer::fused_words(int local) const {
  const std::int64_t groups = max_rows_ / kRowGroup;
  std::uint64_t* const words = fused_words_.get() + local * (groups + kFusedCounts);
  return {.rows = words,
          .relays = words + groups,
          .tiles = words + groups + 1,
          .blocks = words + groups + 2};
}

FusedShape SplitLayer::fused_shape() const {
  return {.num_local_ranks = num_local_ranks_,
          .clusters_per_rank = count_gemm_blocks(schedule_.num_sms) / 2 / num_local_ranks_,
          .moving_blocks = (schedule_.blocks_per_rank + 1) / 2 * 2};
}

void SplitLayer::check_fused() const {
  if (num_local_ranks_ > kMaxFusedRanks) {
    throw_invalid("{} ranks in one launch of a fused forward; 1 to {} are valid", num_local_ranks_,
                  kMaxFusedRanks);
  }
  const FusedShape fused = fused_shape();
  if (fused.moving_blocks > 2 * fused.clusters_per_rank) {
    throw_invalid(
        "{} ranks with {} blocks that move rows each, in a fused forward on {} SMs; at most {} "
        "blocks per rank are valid",
        num_local_ranks_, fused.moving_blocks, count_gemm_blocks(schedule_.num_sms),
        2 * fused.clusters_per_rank);
  }
}

void SplitLayer::fused_dispatch(Pass pass, const Saved& saved, std::span<const DispatchRank> sends,
                                std::span<const Product> products, cudaStream_t stream) const {
  FusedDispatchArgs args{};
  args.shape = move_shape();
  args.fused = fused_shape();
  args.in_order = saved.plan->in_order();
  args.owner_start = saved.plan->owner_start();
  args.num_experts = placement_.num_experts();
  std::copy(sends.begin(), sends.end(), args.ranks);
  for (int local = 0; local < num_local_ranks_; ++local) {
    args.gemm[local] = kernel_args(saved, local, products[at(local)]);
    args.words[local] = fused_words(local);
  }
  check_launch("dispatch with a product", launch_fused_dispatch(pass, args, stream));
}

void SplitLayer::fused_combine(Pass pass, const Saved& saved, std::span<const Product> products,
                               std::span<const CombineRank> returns, cudaStream_t stream) const {
  FusedCombineArgs args{};
  args.shape = move_shape();
  args.fused = fused_shape();
  std::copy(returns.begin(), returns.end(), args.ranks);
  for (int local = 0; local < num_local_ranks_; ++local) {
    args.gemm[local] = kernel_args(saved, local, products[at(local)]);
    args.y_rows[local] = y_rows(local);
    args.words[local] = fused_words(local);
  }
  check_launch("a product with combine", launch_fused_combine(pass, args, stream));
}

void SplitLayer::backward(const Saved& saved, std::span<const BackwardTensors> ranks,
                          cudaStream_t stream) {
  check_count(ranks.size(), num_local_ranks_);
  if (saved.layer != this) {
    throw_invalid("the saved forward is not of this layer; backward needs one that is");
  }
  std::vector<DispatchRank> sends;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const BackwardTensors& t = ranks[at(local)];
    const int rank = first_rank_ + local;
    const std::int64_t num_tokens = saved.ranks[at(local)].num_tokens;
    check_tensor(rank, "d_out", t.d_out, num_tokens == 0);
    check_tensor(rank, "d_x", t.d_x, num_tokens == 0);
    check_tensor(rank, "d_topk_weights", t.d_topk_weights, num_tokens == 0);
    for (const auto& [name, pointer] : {std::pair<const char*, const void*>{"w1", t.w1},
                                        {"w2", t.w2},
                                        {"d_w1", t.d_w1},
                                        {"d_w2", t.d_w2}}) {
      check_tensor(rank, name, pointer, experts_of(local) == 0);
    }
    sends.push_back({.plan = plan_of(saved, local),
                     .rows = static_cast<const std::byte*>(t.d_out),
                     .topk_weights = nullptr,
                     .num_tokens = num_tokens,
                     .rows_out = d_rows_[at(local)].get(),
                     .weights_out = nullptr,
                     .experts = experts_of(local)});
  }
  std::vector<Product> first, second;
  std::vector<CombineRank> returns;
  const bool is_f32 = shape_.dtype == DType::f32;
  for (int local = 0; local < num_local_ranks_; ++local) {
    const BackwardTensors& t = ranks[at(local)];
    first.push_back({.op = GemmOp::dgrad,
                     .n = shape_.hidden,
                     .k = shape_.ffn,
                     .x = nullptr,
                     .d_y = d_rows_[at(local)].get(),
                     .w = t.w2,
                     .out = d_a_[at(local)].get(),
                     .is_f32 = true});
    second.push_back({.op = GemmOp::dgrad,
                      .n = 2 * shape_.ffn,
                      .k = shape_.hidden,
                      .x = nullptr,
                      .d_y = d_h_[at(local)].get(),
                      .w = t.w1,
                      .out = y_rows(local),
                      .is_f32 = is_f32});
    returns.push_back({.plan = plan_of(saved, local),
                       .y_rows = y_rows(local),
                       .d_weight_rows = d_weight_rows(local),
                       .num_tokens = saved.ranks[at(local)].num_tokens,
                       .out = static_cast<std::byte*>(t.d_x),
                       .d_topk_weights = t.d_topk_weights,
                       .experts = experts_of(local)});
  }
  const bool fused = schedule_.fusion == Fusion::fused;
  begin(fused ? "fused dispatch" : "dispatch");
  if (fused) {
    fused_dispatch(Pass::backward, saved, sends, first, stream);
  } else {
    dispatch(sends, stream);
  }
  begin(fused ? "activation" : "products");
  for (int local = 0; local < num_local_ranks_; ++local) {
    if (!fused) multiply(saved, local, first[at(local)], stream);
    if (experts_of(local) > 0) {
      check_launch("the activation's gradient",
                   launch_activation_gradient(activation_args(saved, local), stream));
    }
    if (!fused) multiply(saved, local, second[at(local)], stream);
  }
  begin(fused ? "fused combine" : "combine");
  if (fused) {
    fused_combine(Pass::backward, saved, second, returns, stream);
  } else {
    combine(returns, stream);
  }
  begin("wgrad");
  for (int local = 0; local < num_local_ranks_; ++local) {
    const BackwardTensors& t = ranks[at(local)];
    multiply(saved, local,
             {.op = GemmOp::wgrad,
              .n = shape_.hidden,
              .k = shape_.ffn,
              .x = a_[at(local)].get(),
              .d_y = d_rows_[at(local)].get(),
              .w = nullptr,
              .out = t.d_w2,
              .is_f32 = true,
              .accumulate = t.accumulate},
             stream);
    multiply(saved, local,
             {.op = GemmOp::wgrad,
              .n = 2 * shape_.ffn,
              .k = shape_.hidden,
              .x = saved.ranks[at(local)].x_rows.get(),
              .d_y = d_h_[at(local)].get(),
              .w = nullptr,
              .out = t.d_w1,
              .is_f32 = true,
              .accumulate = t.accumulate},
             stream);
  }
  begin("end");
}

void SplitLayer::check(const Saved& saved, cudaStream_t stream) const {
  if (saved.plan == nullptr) {
    memory_.check(stream);
    return;
  }
  saved.plan->check(stream);
}

}  // namespace uniep::cuda
