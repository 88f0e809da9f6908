// SPDX-License-Identifier: Apache-2.0
// Checks, the layout of the plan's memory, and the launch.
#include "cuda/plan.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "cuda/device_memory.hpp"

namespace uniep::cuda {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

// Rows a rank may get, padding included, whatever the routing.
std::int64_t rows_bound(const PlanShape& shape, std::int64_t num_ranks, std::int64_t experts) {
  return num_ranks * shape.max_tokens * shape.topk + experts * (kExpertRowAlignment - 1);
}

void check_shape(const PlanShape& shape, const Placement& placement) {
  if (placement.num_experts() < 1 || placement.num_experts() > kMaxPlanExperts) {
    throw_invalid("{} experts in a plan on the GPU; 1 to {} are valid", placement.num_experts(),
                  kMaxPlanExperts);
  }
  if (placement.num_ranks < 1 || placement.num_ranks > kMaxDeviceRanks) {
    throw_invalid("{} ranks in a plan on the GPU; 1 to {} are valid", placement.num_ranks,
                  kMaxDeviceRanks);
  }
  if (shape.topk < 1 || shape.topk > kMaxTopk) {
    throw_invalid("topk is {}; it must be 1 to {}", shape.topk, kMaxTopk);
  }
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max();
  const std::int64_t padding = placement.num_experts() * kExpertRowAlignment;
  const std::int64_t most = (kMaxRows - padding) / placement.num_ranks / shape.topk;
  if (shape.max_tokens < 0 || shape.max_tokens > most) {
    throw_invalid("{} tokens per rank; with {} ranks and topk {}, 0 to {} are valid",
                  shape.max_tokens, placement.num_ranks, shape.topk, most);
  }
  if (shape.tile_m < 1) throw_invalid("tile_m is {}; it must be at least 1", shape.tile_m);
  if (shape.blocks_per_rank < 1 || shape.blocks_per_rank > kMaxBlocksPerRank) {
    throw_invalid("{} blocks per rank; 1 to {} are valid", shape.blocks_per_rank,
                  kMaxBlocksPerRank);
  }
}

PlanRegions place_regions(const PlanShape& shape, const Placement& placement,
                          std::int64_t* bytes = nullptr) {
  Pieces pieces(kControlBytes);
  PlanRegions regions{};
  regions.block_ready = pieces.take(kMaxBlocksPerRank, 8);
  regions.counts_ready = pieces.take(placement.num_ranks, 8);
  regions.order_ready = pieces.take(std::int64_t{placement.num_ranks} * kMaxBlocksPerRank, 8);
  regions.counts = pieces.take(std::int64_t{placement.num_ranks} * placement.num_experts(), 4);
  regions.refused = pieces.take(placement.num_ranks, 8);
  regions.send_order = pieces.take(shape.max_tokens * shape.topk, 4);
  if (bytes != nullptr) *bytes = pieces.bytes();
  return regions;
}

// The order in which `experts` local experts get tiles.
std::vector<std::int32_t> tile_order_of(std::span<const std::vector<std::int32_t>> orders, int rank,
                                        int experts) {
  std::vector<std::int32_t> ascending(at(experts));
  for (int local = 0; local < experts; ++local) ascending[at(local)] = local;
  if (orders.empty()) return ascending;
  std::vector<std::int32_t> sorted = orders[at(rank)];
  std::sort(sorted.begin(), sorted.end());
  if (sorted != ascending) {
    throw_invalid("the tile order of rank {} must list its {} local experts once each", rank,
                  experts);
  }
  return orders[at(rank)];
}

// rank_of, in_order, tile_order, each [num_experts], then owner_start.
std::vector<std::int32_t> placement_tables(const Placement& placement,
                                           std::span<const std::vector<std::int32_t>> orders) {
  std::vector<std::int32_t> in_order, tile_order, owner_start{0};
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    const auto& mine = placement.experts_of[at(rank)];
    in_order.insert(in_order.end(), mine.begin(), mine.end());
    const auto order = tile_order_of(orders, rank, placement.num_local_experts(rank));
    tile_order.insert(tile_order.end(), order.begin(), order.end());
    owner_start.push_back(static_cast<std::int32_t>(in_order.size()));
  }
  std::vector<std::int32_t> tables = placement.rank_of;
  for (const auto* table : {&in_order, &tile_order, &owner_start}) {
    tables.insert(tables.end(), table->begin(), table->end());
  }
  return tables;
}

}  // namespace

std::int64_t DevicePlan::bytes_per_rank(const PlanShape& shape, const Placement& placement) {
  check_shape(shape, placement);
  std::int64_t bytes = 0;
  place_regions(shape, placement, &bytes);
  return bytes;
}

DevicePlan::DevicePlan(const SymmetricMemory& memory, const PlanShape& shape,
                       const Placement& placement,
                       std::span<const std::vector<std::int32_t>> tile_orders,
                       std::optional<RankRange> local)
    : memory_(memory), shape_(shape), local_(local.value_or(RankRange{0, memory.num_ranks()})) {
  const std::int64_t bytes = bytes_per_rank(shape, placement);
  if (local_.first < 0 || local_.count < 1 || local_.count > memory.num_ranks() - local_.first) {
    throw_invalid("a plan for {} ranks from rank {}; the group has ranks 0 to {}", local_.count,
                  local_.first, memory.num_ranks() - 1);
  }
  if (placement.num_ranks != memory.num_ranks()) {
    throw_invalid("the placement has {} ranks and the symmetric memory {}; they must agree",
                  placement.num_ranks, memory.num_ranks());
  }
  if (bytes > memory.bytes_per_rank()) {
    throw_invalid("the plan needs {} bytes of a rank's symmetric memory, which has {}", bytes,
                  memory.bytes_per_rank());
  }
  if (!tile_orders.empty() && tile_orders.size() != at(placement.num_ranks)) {
    throw_invalid("{} tile orders for {} ranks; give one for each, or none", tile_orders.size(),
                  placement.num_ranks);
  }
  int most = 0;
  for (int rank = 0; rank < placement.num_ranks; ++rank) {
    local_experts_.push_back(placement.num_local_experts(rank));
    most = std::max(most, local_experts_.back());
  }
  args_.group = memory.view();
  args_.regions = place_regions(shape, placement);
  args_.num_experts = placement.num_experts();
  args_.topk = shape.topk;
  args_.tile_m = shape.tile_m;
  args_.blocks_per_rank = shape.blocks_per_rank;
  shared_bytes_ = plan_shared_bytes(args_.num_experts, most, placement.num_ranks);
  const cudaError_t error = count_resident_plan_blocks(shared_bytes_, &resident_blocks_);
  if (error != cudaSuccess) {
    throw_world("the plan's kernel cannot run here: {}", cudaGetErrorString(error));
  }
  place_arrays(placement, tile_orders);
}

DevicePlan::~DevicePlan() { cudaFree(private_); }

void DevicePlan::place_arrays(const Placement& placement,
                              std::span<const std::vector<std::int32_t>> tile_orders) {
  const std::vector<std::int32_t> tables = placement_tables(placement, tile_orders);
  const std::int64_t choices = shape_.max_tokens * shape_.topk;
  const std::int64_t num_experts = args_.num_experts;
  // Twice: offsets from a null base to learn the size, then pointers.
  std::byte* base = nullptr;
  std::int64_t bytes = 0;
  std::int64_t tables_at = 0;
  const auto place = [&] {
    Pieces pieces(0);
    const auto take = [&]<typename T>(T*& pointer, std::int64_t count) {
      const std::int64_t offset = pieces.take(count, sizeof(T));
      if (base != nullptr) pointer = reinterpret_cast<T*>(base + offset);
    };
    tables_at = pieces.take(static_cast<std::int64_t>(tables.size()), 4);
    for (int rank = local_.first; rank < local_.first + local_.count; ++rank) {
      PlanRank& r = args_.ranks[rank];
      const std::int64_t experts = local_experts_[at(rank)];
      const std::int64_t runs = experts * placement.num_ranks;
      take(r.out.expert_rows, experts);
      take(r.out.expert_starts, experts + 1);
      take(r.out.run_starts, runs);
      take(r.out.run_rows, runs);
      take(r.out.source_starts, runs);
      take(r.out.slots, choices);
      take(r.out.first_choices, choices);
      take(r.out.owners, choices);
      take(r.out.send_starts, num_experts + 1);
      take(r.out.row_sources, max_rows(rank));
      take(r.out.tiles, max_tiles(rank));
      take(r.out.counts, 1);
      take(r.out.refusal, 1);
      take(r.out.send_order, choices);
      take(r.block_counts, shape_.blocks_per_rank * num_experts);
      take(r.block_refused, shape_.blocks_per_rank);
    }
    bytes = pieces.bytes();
  };
  place();
  if (const cudaError_t error = cudaMalloc(&private_, at(bytes)); error != cudaSuccess) {
    throw_world("{} bytes for the plan are not there: {}", bytes, cudaGetErrorString(error));
  }
  base = private_;
  place();
  const auto* table = reinterpret_cast<const std::int32_t*>(base + tables_at);
  args_.rank_of = table;
  args_.in_order = table + num_experts;
  args_.tile_order = table + 2 * num_experts;
  args_.owner_start = table + 3 * num_experts;
  cudaError_t error = cudaMemset(private_, 0, at(bytes));
  if (error == cudaSuccess) {
    error = cudaMemcpy(base + tables_at, tables.data(), tables.size() * 4, cudaMemcpyHostToDevice);
  }
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    cudaFree(private_);
    throw_world("the plan's memory cannot be written: {}", cudaGetErrorString(error));
  }
}

void DevicePlan::run(std::span<const RankTopk> ranks, cudaStream_t stream, int first_rank) {
  const int end = local_.first + local_.count;
  const auto count = static_cast<int>(ranks.size());
  if (first_rank < local_.first || count < 1 || count > end - first_rank) {
    throw_invalid("a plan of {} ranks from rank {}; this process has ranks {} to {}", count,
                  first_rank, local_.first, end - 1);
  }
  PlanArgs args = args_;
  args.first_rank = first_rank;
  for (int i = 0; i < count; ++i) {
    const RankTopk& given = ranks[at(i)];
    if (given.num_tokens < 0 || given.num_tokens > shape_.max_tokens) {
      throw_invalid("rank {} has {} tokens; 0 to {} are valid", first_rank + i, given.num_tokens,
                    shape_.max_tokens);
    }
    if (given.topk_ids == nullptr && given.num_tokens > 0) {
      throw_invalid("topk_ids of rank {} is null; it must be device memory", first_rank + i);
    }
    args.ranks[i] = args_.ranks[first_rank + i];
    args.ranks[i].topk_ids = given.topk_ids;
    args.ranks[i].num_tokens = given.num_tokens;
  }
  const int blocks = count * shape_.blocks_per_rank;
  if (blocks > resident_blocks_) {
    throw_world(
        "a plan of {} ranks with {} blocks each needs {} blocks resident at once, and this GPU "
        "holds {}; use fewer blocks per rank",
        count, shape_.blocks_per_rank, blocks, resident_blocks_);
  }
  const cudaError_t error = launch_plan(args, count, shared_bytes_, stream);
  if (error != cudaSuccess) throw_world("the plan did not launch: {}", cudaGetErrorString(error));
}

void DevicePlan::check(cudaStream_t stream) const {
  memory_.check(stream);
  PlanRefusal first{};
  for (int rank = local_.first; rank < local_.first + local_.count; ++rank) {
    PlanRefusal* const refusal = args_.ranks[rank].out.refusal;
    PlanRefusal seen{};
    cudaError_t error = cudaMemcpy(&seen, refusal, sizeof(seen), cudaMemcpyDeviceToHost);
    if (error == cudaSuccess && seen.refused != 0) {
      error = cudaMemset(refusal, 0, sizeof(seen));
      if (first.refused == 0) first = seen;
    }
    if (error != cudaSuccess) {
      throw_world("the plan's state cannot be read: {}", cudaGetErrorString(error));
    }
  }
  if (first.refused != 0) {
    throw_invalid(
        "topk_ids of rank {}, token {}, choice {} is {}; ids are 0 to {}, or -1 for masked",
        first.rank, first.place / shape_.topk, first.place % shape_.topk, first.id,
        args_.num_experts - 1);
  }
}

const PlanArrays& DevicePlan::arrays(int rank) const {
  UNIEP_ASSERT(rank >= local_.first && rank < local_.first + local_.count);
  return args_.ranks[rank].out;
}

std::int64_t DevicePlan::max_rows(int rank) const {
  const std::int64_t experts = local_experts_[at(rank)];
  return experts == 0 ? 0 : rows_bound(shape_, memory_.num_ranks(), experts);
}

std::int64_t DevicePlan::max_tiles(int rank) const {
  return max_rows(rank) / shape_.tile_m + local_experts_[at(rank)];
}

}  // namespace uniep::cuda
