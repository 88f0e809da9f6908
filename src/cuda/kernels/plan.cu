// SPDX-License-Identifier: Apache-2.0
// The plan's kernel. A rank's blocks cut its choices into chunks, one a block, in order; a block's
// warps cut the chunk again. Counts of all chunks before it give each warp the place of its first
// row of every expert, and a match within 32 choices the places of the rest: positions never depend
// on who arrives first.
#include "cuda/kernels/unroll.hpp"
#include "cuda/launch.hpp"
#include "cuda/plan_args.hpp"
#include "cuda/wait.cuh"

namespace uniep::cuda {
namespace {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr u32 kAllLanes = 0xFFFFFFFFU;
constexpr u64 kNoneRefused = ~u64{0};
constexpr int kBatch = 4;  // rounds of 32 choices whose ids are loaded at once
constexpr int kGroup = static_cast<int>(kExpertRowAlignment);

struct Shared {
  u64 warp_sums[kPlanWarps];
  unsigned long long refused;
  // By local expert.
  u32 starts[kMaxPlanExperts + 1];
  u32 rows[kMaxPlanExperts];
  // By place in the tile order, which holds local experts.
  std::uint16_t tile_order[kMaxPlanExperts];
  u32 tile_first[kMaxPlanExperts + 1];
  // By expert. slot_bias is the slot minus the place in send_order, modulo 2^32.
  u32 slot_bias[kMaxPlanExperts];
  std::uint16_t local[kMaxPlanExperts];
  std::uint8_t owner[kMaxPlanExperts];
  // By place in the owner order.
  u32 padded_before[kMaxPlanExperts + 1];
  u32 num_rows;
  u32 num_tiles;
  int first;  // place of the rank's first expert in the owner order
  int num_local;
};

struct Block {
  const PlanArgs& args;
  const PlanRank& mine;
  int rank;
  int index;  // of the rank's blocks
  int thread;
  int warp;
  int lane;
  u64 epoch;

  template <typename T>
  [[nodiscard]] __device__ T* region(int of_rank, std::int64_t offset) const {
    return reinterpret_cast<T*>(args.group.parts[of_rank] + offset);
  }
  [[nodiscard]] __device__ const u32* counts_of(int source) const {
    return region<const u32>(rank, args.regions.counts) + source * args.num_experts;
  }
};

// The warp's choices: a multiple of 32 of them, so that where topk divides 32 no token straddles
// two warps or rounds.
struct Range {
  u32 first;
  u32 end;
};

__device__ Range warp_range(const Block& block) {
  const auto choices = static_cast<u32>(block.mine.num_tokens * block.args.topk);
  const auto warps = static_cast<u32>(block.args.blocks_per_rank * kPlanWarps);
  const u32 size = ((choices + warps - 1) / warps + 31) / 32 * 32;
  const u64 first = u64{size} * static_cast<u32>(block.index * kPlanWarps + block.warp);
  const u64 end = first + size;
  return {static_cast<u32>(first < choices ? first : choices),
          static_cast<u32>(end < choices ? end : choices)};
}

// Calls body(place, id) for the warp's choices, 32 at a time; beyond the end id is -1.
template <typename Body>
__device__ __forceinline__ void for_each_choice(const Block& block, Body body) {
  const Range range = warp_range(block);
  for (u32 first = range.first; first < range.end; first += 32 * kBatch) {
    std::int32_t ids[kBatch];
    UNIEP_UNROLL for (int i = 0; i < kBatch; ++i) {
      const u32 place = first + static_cast<u32>(i * 32 + block.lane);
      ids[i] = place < range.end ? block.mine.topk_ids[place] : -1;
    }
    UNIEP_UNROLL for (int i = 0; i < kBatch; ++i) {
      if (first + static_cast<u32>(i * 32) >= range.end) break;
      body(first + static_cast<u32>(i * 32 + block.lane), ids[i]);
    }
  }
}

// Exclusive prefix sum over the threads of the block; `total` is the sum of all.
__device__ u64 scan_block(const Block& block, Shared& shared, u64 value, u64& total) {
  u64 inclusive = value;
  UNIEP_UNROLL for (int offset = 1; offset < 32; offset *= 2) {
    const u64 below = __shfl_up_sync(kAllLanes, inclusive, static_cast<u32>(offset));
    if (block.lane >= offset) inclusive += below;
  }
  __syncthreads();  // the sums of a scan before were read
  if (block.lane == 31) shared.warp_sums[block.warp] = inclusive;
  __syncthreads();
  u64 before = 0;
  total = 0;
  UNIEP_UNROLL for (int warp = 0; warp < kPlanWarps; ++warp) {
    const u64 sum = shared.warp_sums[warp];
    if (warp < block.warp) before += sum;
    total += sum;
  }
  return before + inclusive - value;
}

// Rows of each expert in each warp's choices; the first id that is no expert is noted and counts as
// masked.
__device__ void count_choices(const Block& block, Shared& shared, u32* warp_counts) {
  const int num_experts = block.args.num_experts;
  for (int i = block.thread; i < kPlanWarps * num_experts; i += kPlanThreads) warp_counts[i] = 0;
  if (block.thread == 0) shared.refused = kNoneRefused;
  __syncthreads();
  u32* const counts = warp_counts + block.warp * num_experts;
  for_each_choice(block, [&](u32 place, std::int32_t id) {
    if (id < -1 || id >= num_experts) {
      atomicMin(&shared.refused, u64{place} << 32 | static_cast<u32>(id));
      id = -1;
    }
    const u32 same = __match_any_sync(kAllLanes, id);
    if (id >= 0 && __ffs(static_cast<int>(same)) - 1 == block.lane) {
      atomicAdd(&counts[id], static_cast<u32>(__popc(same)));
    }
  });
  __syncthreads();
}

// Publishes the block's counts to the rank's blocks and waits for theirs. warp_counts become
// exclusive sums over the warps. False if the group is poisoned.
__device__ bool exchange_in_rank(const Block& block, const Shared& shared, u32* warp_counts) {
  const PlanArgs& args = block.args;
  if (block.thread < args.num_experts) {
    u32 sum = 0;
    UNIEP_UNROLL for (int warp = 0; warp < kPlanWarps; ++warp) {
      u32& count = warp_counts[warp * args.num_experts + block.thread];
      const u32 before = sum;
      sum += count;
      count = before;
    }
    block.mine.block_counts[block.index * args.num_experts + block.thread] = sum;
  }
  if (block.thread == 0) block.mine.block_refused[block.index] = shared.refused;
  __syncthreads();
  auto* const ready = block.region<u64>(block.rank, args.regions.block_ready);
  if (block.thread == 0) ptx::store_release_gpu(&ready[block.index], block.epoch);
  bool failed = false;
  if (block.thread < args.blocks_per_rank) {
    failed = !wait_at_least(args.group, &ready[block.thread], block.epoch,
                            {block.rank, WaitStage::plan_blocks, block.rank, block.thread});
  }
  return __syncthreads_or(failed) == 0;
}

// Rows of the thread's expert in the rank's chunks before this block's; block 0 also writes the sum
// over all chunks into every part and signals.
__device__ u32 publish_counts(const Block& block) {
  const PlanArgs& args = block.args;
  const bool publisher = block.index == 0;
  u32 before = 0;
  u32 total = 0;
  if (block.thread < args.num_experts) {
    const int blocks = publisher ? args.blocks_per_rank : block.index;
    const u32* const counts = block.mine.block_counts + block.thread;
    _Pragma("unroll 8") for (int other = 0; other < blocks; ++other) {
      total += __ldcg(counts + other * args.num_experts);
    }
    before = publisher ? 0 : total;
    if (publisher) {
      for (int peer = 0; peer < args.group.num_ranks; ++peer) {
        block.region<u32>(peer, args.regions.counts)[block.rank * args.num_experts + block.thread] =
            total;
      }
    }
  }
  if (!publisher) return before;
  if (block.thread < args.group.num_ranks) {
    u64 refused = kNoneRefused;
    for (int other = 0; other < args.blocks_per_rank; ++other) {
      const u64 seen =
          __ldcg(reinterpret_cast<const unsigned long long*>(&block.mine.block_refused[other]));
      refused = seen < refused ? seen : refused;
    }
    block.region<u64>(block.thread, args.regions.refused)[block.rank] = refused;
  }
  __syncthreads();
  if (block.thread < args.group.num_ranks) {
    ptx::store_release_system(
        &block.region<u64>(block.thread, args.regions.counts_ready)[block.rank], block.epoch);
  }
  return before;
}

__device__ bool wait_for_counts(const Block& block) {
  const PlanArgs& args = block.args;
  bool failed = false;
  if (block.thread < args.group.num_ranks) {
    const auto* ready = block.region<const u64>(block.rank, args.regions.counts_ready);
    failed = !wait_at_least(args.group, &ready[block.thread], block.epoch,
                            {block.rank, WaitStage::plan_counts, block.thread, -1});
  }
  return __syncthreads_or(failed) == 0;
}

// True if any rank refused an id; the rank's refusal then names the first, unless it has one.
__device__ bool group_refused(const Block& block) {
  const PlanArgs& args = block.args;
  const auto* refused = block.region<const unsigned long long>(block.rank, args.regions.refused);
  const bool mine =
      block.thread < args.group.num_ranks && __ldcg(&refused[block.thread]) != kNoneRefused;
  if (__syncthreads_or(mine) == 0) return false;
  if (block.index == 0 && block.thread == 0) {
    int source = 0;
    while (__ldcg(&refused[source]) == kNoneRefused) ++source;
    const u64 word = __ldcg(&refused[source]);
    PlanRefusal& refusal = *block.mine.out.refusal;
    if (refusal.refused == 0) {
      refusal = {1, source, static_cast<std::int32_t>(word >> 32),
                 static_cast<std::int32_t>(word & 0xFFFFFFFFU)};
    }
    *block.mine.out.counts = {};
  }
  return true;
}

// The expert at the thread's place of the owner order; read before the wait for counts.
struct Expert {
  int id;
  int owner;
  int owner_first;  // the owner's first place in the owner order
};

__device__ Expert find_expert(const Block& block, Shared& shared) {
  const PlanArgs& args = block.args;
  Expert expert{};
  const int first = args.owner_start[block.rank];
  const int num_local = args.owner_start[block.rank + 1] - first;
  if (block.thread == 0) {
    shared.first = first;
    shared.num_local = num_local;
  }
  expert.id = block.thread < args.num_experts ? args.in_order[block.thread] : 0;
  expert.owner = args.rank_of[expert.id];
  expert.owner_first = args.owner_start[expert.owner];
  if (block.thread < num_local) {
    shared.tile_order[block.thread] =
        static_cast<std::uint16_t>(args.tile_order[first + block.thread]);
  }
  return expert;
}

struct ExpertCounts {
  u32 rows;    // of the thread's expert
  u32 before;  // of these, from sources below this rank
  u32 sent;    // by this rank to expert number `thread`
};

__device__ ExpertCounts load_counts(const Block& block, const Expert& expert) {
  ExpertCounts counts{};
  if (block.thread >= block.args.num_experts) return counts;
  _Pragma("unroll 8") for (int source = 0; source < block.args.group.num_ranks; ++source) {
    const u32 rows = __ldcg(block.counts_of(source) + expert.id);
    counts.rows += rows;
    if (source < block.rank) counts.before += rows;
  }
  counts.sent = __ldcg(block.counts_of(block.rank) + block.thread);
  return counts;
}

// From all ranks' counts to the starts of experts, runs and sends, in shared memory. `before` is
// what publish_counts gave. The last block of a rank also writes the receiver's arrays.
__device__ void find_starts(const Block& block, Shared& shared, u32* warp_counts,
                            const Expert& expert, const ExpertCounts& counts, u32 before) {
  const PlanArgs& args = block.args;
  const int num_experts = args.num_experts;
  const int num_ranks = args.group.num_ranks;
  const int first = shared.first;
  const int num_local = shared.num_local;
  const bool is_local = block.thread >= first && block.thread < first + num_local;
  const u32 rows = counts.rows;
  const u32 padded = (rows + kGroup - 1) / kGroup * kGroup;
  // Low: padded rows in the owner order. High: the rank's own rows. Both stay below 2^31.
  u64 total = 0;
  const u64 scanned = scan_block(block, shared, (is_local ? u64{rows} << 32 : 0) | padded, total);
  shared.padded_before[block.thread] = static_cast<u32>(scanned);
  if (block.thread == 0) shared.num_rows = static_cast<u32>(total >> 32);
  if (is_local) shared.rows[block.thread - first] = rows;
  __syncthreads();
  const u32 start = static_cast<u32>(scanned) - shared.padded_before[expert.owner_first];
  if (is_local) {
    shared.starts[block.thread - first] = start;
    if (block.thread == first + num_local - 1) shared.starts[num_local] = start + padded;
  }
  if (num_local == 0 && block.thread == 0) shared.starts[0] = 0;
  if (block.thread < num_experts) {
    shared.slot_bias[expert.id] = start + counts.before;
    shared.owner[expert.id] = static_cast<std::uint8_t>(expert.owner);
    shared.local[expert.id] = static_cast<std::uint16_t>(block.thread - expert.owner_first);
  }
  // Low: rows sent, by expert. High: tiles, in the tile order.
  u32 tiles = 0;
  if (block.thread < num_local) {
    const auto tile_m = static_cast<u32>(args.tile_m);
    const u32 tile_rows = shared.rows[shared.tile_order[block.thread]];
    tiles = tile_rows / tile_m + (tile_rows % tile_m != 0 ? 1 : 0);
  }
  const u64 sends = scan_block(block, shared, u64{tiles} << 32 | counts.sent, total);
  shared.tile_first[block.thread] = static_cast<u32>(sends >> 32);
  if (block.thread == 0) {
    shared.num_tiles = static_cast<u32>(total >> 32);
  }
  if (block.thread < num_experts) {
    const auto send_start = static_cast<u32>(sends);
    shared.slot_bias[block.thread] -= send_start;  // scan_block had a barrier since the writes
    UNIEP_UNROLL for (int warp = 0; warp < kPlanWarps; ++warp) {
      warp_counts[warp * num_experts + block.thread] += send_start + before;
    }
  }
  if (block.index == args.blocks_per_rank - 1) {
    const PlanArrays& out = block.mine.out;
    if (is_local) {
      const int local = block.thread - first;
      out.expert_rows[local] = rows;
      out.expert_starts[local] = start;
      if (local == num_local - 1) out.expert_starts[num_local] = std::int64_t{start} + padded;
      u32 next = start;
      for (int source = 0; source < num_ranks; ++source) {
        const u32 count = __ldcg(block.counts_of(source) + expert.id);
        out.run_starts[local * num_ranks + source] = next;
        out.run_rows[local * num_ranks + source] = count;
        next += count;
      }
    }
    if (num_local == 0 && block.thread == 0) out.expert_starts[0] = 0;
    if (block.thread < num_experts) {
      out.send_starts[block.thread] = static_cast<std::int64_t>(sends & 0xFFFFFFFFU);
    }
    if (block.thread == 0) {
      out.send_starts[num_experts] = static_cast<std::int64_t>(total & 0xFFFFFFFFU);
      *out.counts = {1, shared.num_rows, static_cast<std::int64_t>(total >> 32),
                     static_cast<std::int64_t>(total & 0xFFFFFFFFU)};
    }
  }
  __syncthreads();
}

// Where the rank's runs start in the send orders of the sources: a warp for a source, spread over
// the rank's blocks.
__device__ void find_source_starts(const Block& block, const Shared& shared) {
  constexpr int kRounds = 8;  // of 32 experts whose counts are loaded at once
  const PlanArgs& args = block.args;
  const int num_ranks = args.group.num_ranks;
  const int source = block.index + args.blocks_per_rank * block.warp;
  if (source >= num_ranks) return;
  u32 sent = 0;
  UNIEP_NO_UNROLL for (int first = 0; first < args.num_experts; first += 32 * kRounds) {
    u32 counts[kRounds];
    UNIEP_UNROLL for (int i = 0; i < kRounds; ++i) {
      const int expert = first + i * 32 + block.lane;
      counts[i] = expert < args.num_experts ? __ldcg(block.counts_of(source) + expert) : 0;
    }
    UNIEP_UNROLL for (int i = 0; i < kRounds; ++i) {
      const int expert = first + i * 32 + block.lane;
      u32 inclusive = counts[i];
      UNIEP_UNROLL for (int offset = 1; offset < 32; offset *= 2) {
        const u32 below = __shfl_up_sync(kAllLanes, inclusive, static_cast<u32>(offset));
        if (block.lane >= offset) inclusive += below;
      }
      if (expert < args.num_experts && shared.owner[expert] == block.rank) {
        block.mine.out.source_starts[shared.local[expert] * num_ranks + source] =
            std::int64_t{sent} + inclusive - counts[i];
      }
      sent += __shfl_sync(kAllLanes, inclusive, 31);
    }
  }
}

// Of the token's choices with the same owner the first in send_order, found by looking at all.
__device__ int find_first_choice(const Block& block, const Shared& shared, u32 place, int owner) {
  const auto topk = static_cast<u32>(block.args.topk);
  const u32 token = place / topk * topk;
  u32 first = place;
  for (u32 other = token; other < token + topk; ++other) {
    const std::int32_t id = block.mine.topk_ids[other];
    if (id < 0 || shared.owner[id] != owner) continue;
    const std::int32_t first_id = block.mine.topk_ids[first];
    if (id < first_id || (id == first_id && other < first)) first = other;
  }
  return static_cast<int>(first - token);
}

// slots, first_choices, owners and send_order. warp_counts hold the next place of every expert's
// rows.
__device__ void place_choices(const Block& block, const Shared& shared, u32* warp_counts) {
  const PlanArgs& args = block.args;
  const PlanArrays& out = block.mine.out;
  u32* const next = warp_counts + block.warp * args.num_experts;
  auto* const shared_order = block.region<std::int32_t>(block.rank, args.regions.send_order);
  const u32 end = warp_range(block).end;
  constexpr u32 kMasked = 0xFFFFFFFFU;
  const bool tokens_fit = 32 % args.topk == 0;
  const int lane_token = block.lane / args.topk;
  const int lane_choice = block.lane - lane_token * args.topk;
  for_each_choice(block, [&](u32 place, std::int32_t id) {
    const u32 same = __match_any_sync(kAllLanes, id);
    const u32 before = same & ((1U << block.lane) - 1U);
    const int owner = id >= 0 ? shared.owner[id] : 0;
    u32 send_place = 0;
    if (id >= 0) send_place = next[id] + static_cast<u32>(__popc(before));
    __syncwarp();
    if (id >= 0 && before == 0) next[id] += static_cast<u32>(__popc(same));
    __syncwarp();
    int choice = lane_choice;
    if (tokens_fit) {
      // The least expert of the lanes that have the token and the owner.
      const u32 key = id >= 0 ? static_cast<u32>(owner) << 16 | static_cast<u32>(id) : kMasked;
      u32 least = kMasked;
      for (int other = 0; other < args.topk; ++other) {
        const u32 others = __shfl_sync(kAllLanes, key, lane_token * args.topk + other);
        if (others >> 16 == key >> 16 && others < least) {
          least = others;
          choice = other;
        }
      }
    } else if (id >= 0) {
      choice = find_first_choice(block, shared, place, owner);
    } else {
      choice = static_cast<int>(place % static_cast<u32>(args.topk));
    }
    if (place >= end) return;
    out.slots[place] = id >= 0 ? std::int64_t{shared.slot_bias[id] + send_place} : -1;
    out.first_choices[place] = static_cast<std::uint8_t>(choice);
    out.owners[place] = id >= 0 ? static_cast<std::uint8_t>(owner) : kNoOwner;
    if (id < 0) return;
    // For the peers, and for as long as the plan is kept.
    shared_order[send_place] = static_cast<std::int32_t>(place);
    out.send_order[send_place] = static_cast<std::int32_t>(place);
  });
}

// Last i in [0, count) with starts[i] <= value; starts ascend from 0.
__device__ int find_last(const u32* starts, int count, u32 value) {
  int low = 0;
  int high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ void write_tiles(const Block& block, const Shared& shared) {
  const PlanArgs& args = block.args;
  const int num_local = shared.num_local;
  const auto tile_m = static_cast<u32>(args.tile_m);
  const u32 stride = static_cast<u32>(args.blocks_per_rank) * kPlanThreads;
  for (u32 tile = static_cast<u32>(block.index * kPlanThreads + block.thread);
       tile < shared.num_tiles; tile += stride) {
    const int order = find_last(shared.tile_first, num_local, tile);
    const int local = shared.tile_order[order];
    const u32 offset = (tile - shared.tile_first[order]) * tile_m;
    const u32 left = shared.rows[local] - offset;
    block.mine.out.tiles[tile] = {local, static_cast<std::int32_t>(left < tile_m ? left : tile_m),
                                  std::int64_t{shared.starts[local]} + offset};
  }
}

// Signals that this block's part of send_order is written, and waits for every block's. False if
// the group is poisoned.
__device__ bool exchange_order(const Block& block, const Shared& shared, bool refused) {
  const PlanArgs& args = block.args;
  const int num_ranks = args.group.num_ranks;
  __syncthreads();
  if (block.thread < num_ranks) {
    ptx::store_release_system(
        &block.region<u64>(block.thread,
                           args.regions.order_ready)[block.rank * kMaxBlocksPerRank + block.index],
        block.epoch);
  }
  if (!refused) write_tiles(block, shared);  // while others get there
  bool failed = false;
  if (block.thread < num_ranks * args.blocks_per_rank) {
    const int source = block.thread / args.blocks_per_rank;
    const int index = block.thread % args.blocks_per_rank;
    const auto* ready = block.region<const u64>(block.rank, args.regions.order_ready);
    failed = !wait_at_least(args.group, &ready[source * kMaxBlocksPerRank + index], block.epoch,
                            {block.rank, WaitStage::plan_order, source, index});
  }
  return __syncthreads_or(failed) == 0;
}

// The reverse map, read from the sources' send orders in runs. A group of 64 rows has one expert.
__device__ void find_row_sources(const Block& block, const Shared& shared, u32* runs) {
  const PlanArgs& args = block.args;
  const PlanArrays& out = block.mine.out;
  const int num_ranks = args.group.num_ranks;
  const int num_local = shared.num_local;
  // Runs: where they start, and what to add to a row to find it in the source's send order.
  u32* const run_starts = runs;
  u32* const run_bias = runs + num_local * num_ranks;
  for (int run = block.thread; run < num_local * num_ranks; run += kPlanThreads) {
    const auto start =
        static_cast<u32>(__ldcg(reinterpret_cast<const long long*>(&out.run_starts[run])));
    run_starts[run] = start;
    run_bias[run] =
        static_cast<u32>(__ldcg(reinterpret_cast<const long long*>(&out.source_starts[run]))) -
        start;
  }
  __syncthreads();
  const auto find = [&](u32 row) -> RowSource {
    const int local = find_last(shared.starts, num_local, row);
    if (row >= shared.starts[local] + shared.rows[local]) return {-1, -1};
    const int source = find_last(run_starts + local * num_ranks, num_ranks, row);
    const auto* const order = block.region<const std::int32_t>(source, args.regions.send_order);
    return {source, __ldcg(order + (row + run_bias[local * num_ranks + source]))};
  };
  const u32 num_rows = shared.starts[num_local];
  const u32 stride = static_cast<u32>(args.blocks_per_rank) * kPlanThreads;
  _Pragma("unroll 4") for (u32 row = static_cast<u32>(block.index * kPlanThreads + block.thread);
                           row < num_rows; row += stride) {
    const RowSource found = find(row);
    reinterpret_cast<int2*>(out.row_sources)[row] = {found.rank, found.place};
  }
}

__global__ void __launch_bounds__(kPlanThreads, 2)
    plan_kernel(const __grid_constant__ PlanArgs args) {
  extern __shared__ u32 dynamic_shared[];  // counts by warp and expert; later the rank's runs
  __shared__ Shared shared;
  const int local_rank = static_cast<int>(blockIdx.x) / args.blocks_per_rank;
  const int rank = args.first_rank + local_rank;
  const RankControl& control = control_of(args.group, rank);
  const u64 epoch = control.epoch + 1;  // written again only when all blocks of the rank have it
  // Nothing may start in a poisoned group, and all threads of a block must agree on that.
  if (__syncthreads_or(ptx::load_relaxed_system(&control.abort_word) != 0) != 0) return;
  const Block block{args,
                    args.ranks[local_rank],
                    rank,
                    static_cast<int>(blockIdx.x) % args.blocks_per_rank,
                    static_cast<int>(threadIdx.x),
                    static_cast<int>(threadIdx.x) / 32,
                    static_cast<int>(threadIdx.x) % 32,
                    epoch};
  count_choices(block, shared, dynamic_shared);
  if (!exchange_in_rank(block, shared, dynamic_shared)) return;
  const u32 before = publish_counts(block);
  const Expert expert = find_expert(block, shared);
  if (!wait_for_counts(block)) return;
  const ExpertCounts counts = load_counts(block, expert);  // on their way while refusals are read
  const bool refused = group_refused(block);
  if (!refused) {
    find_starts(block, shared, dynamic_shared, expert, counts, before);
    find_source_starts(block, shared);
    place_choices(block, shared, dynamic_shared);
  }
  if (!exchange_order(block, shared, refused)) return;
  if (!refused) find_row_sources(block, shared, dynamic_shared);
  if (block.index == 0 && block.thread == 0) control_of(args.group, rank).epoch = epoch;
}

}  // namespace

cudaError_t count_resident_plan_blocks(std::size_t shared_bytes, int* blocks) {
  const cudaError_t error = cudaFuncSetAttribute(
      plan_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(plan_shared_bytes(kMaxPlanExperts, kMaxPlanExperts, kMaxDeviceRanks)));
  if (error != cudaSuccess) return error;
  return count_resident_blocks(plan_kernel, kPlanThreads, shared_bytes, blocks);
}

cudaError_t launch_plan(const PlanArgs& args, int num_local_ranks, std::size_t shared_bytes,
                        cudaStream_t stream) {
  return launch(plan_kernel, true, num_local_ranks * args.blocks_per_rank, kPlanThreads,
                shared_bytes, stream, args);
}

}  // namespace uniep::cuda
