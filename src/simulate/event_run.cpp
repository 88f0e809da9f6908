// SPDX-License-Identifier: Apache-2.0
#include "simulate/event_run.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "plan/plan.hpp"
#include "simulate/event_engine.hpp"
#include "simulate/score.hpp"

namespace uniep::simulate {
namespace {

constexpr int kMoveWarps = 16;
constexpr int kFusedWarps = 12;
constexpr int kConsumerWarps = 8;
constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr std::int64_t kMostTasks = 4'000'000;
constexpr std::uint8_t kProducts = 0;  // a block's lane of products; its warp w moves in lane 1 + w
constexpr std::size_t kLanes = 1 + kMoveWarps;

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }
std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

double rate_of_warp(const RateCurve& curve) {
  return curve.points().front().second / curve.points().front().first;
}

// A piece of an expert's rows as the products cut them: nearly equal multiples of 64.
struct RowPiece {
  std::int32_t local_expert;
  std::int64_t row;   // in the rank's buffer
  std::int64_t rows;  // without padding
  std::int64_t width;
};

std::vector<RowPiece> row_pieces(const Plan& plan) {
  std::vector<RowPiece> pieces;
  for (std::size_t e = 0; e < plan.expert_rows.size(); ++e) {
    const std::int64_t blocks = div_up(plan.expert_rows[e], 64);
    const std::int64_t tiles = div_up(blocks, kTileN / 64);
    std::int64_t first = 0;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t width = blocks / tiles + (tile < blocks % tiles ? 1 : 0);
      pieces.push_back({static_cast<std::int32_t>(e), plan.expert_starts[e] + 64 * first,
                        std::min(64 * width, plan.expert_rows[e] - 64 * first), 64 * width});
      first += width;
    }
  }
  return pieces;
}

class Builder {
 public:
  Builder(const Hardware& hw, const LayerSizes& sizes, const Topology& topology,
          const CudaSchedule& schedule, std::span<const std::int64_t> tokens_per_rank,
          std::span<const std::int32_t> topk_ids)
      : hw_(hw), sizes_(sizes), topology_(topology), s_(schedule) {
    row_ = static_cast<double>(sizes.hidden) * 2;
    if (s_.blocks == 0) s_.blocks = default_blocks(limits());
    if (s_.sms == 0) s_.sms = static_cast<int>(hw.sms);
    fused_ = s_.fusion == Fusion::fused;
    num_gpus_ = static_cast<int>(div_up(topology.ranks, topology.ranks_per_gpu));
    make_plans(tokens_per_rank, topk_ids);
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      const auto movers = static_cast<double>(s_.blocks * (fused_ ? kFusedWarps : kMoveWarps) *
                                              topology.ranks_per_gpu);
      const double pushers = s_.push_warps;
      const double relays = (fused_ ? kFusedWarps : kMoveWarps) - s_.push_warps;
      const double of_dispatch = s_.dispatch == Direction::pull ? relays : pushers;
      const double warps = of_dispatch * moving_blocks() * topology.ranks_per_gpu;
      hbm_.push_back(e_.add_resource(hw.hbm_rate));
      dispatch_link_.push_back(e_.add_resource(dispatch_curve().at(warps)));
      const double stores =
          fused_ ? hw.link_push.at(kConsumerWarps * sms_of_rank() * topology.ranks_per_gpu) *
                       hw.link_short_share
                 : (s_.combine == Direction::pull ? hw.link_pull : hw.link_push).at(movers);
      combine_link_.push_back(e_.add_resource(stores));
      out_link_.push_back(e_.add_resource(hw.scale_out_rate));
    }
    stretches_.resize(at(num_gpus_));
    for (auto& gpu : stretches_) gpu.resize(at(static_cast<std::int64_t>(hw.sms)) * kLanes);
    phase_done_.resize(at(num_gpus_));
  }

  EventRun run(bool backward) {
    pass_ = Pass::forward;
    plan();
    if (fused_) {
      fused_dispatch(Role::gemm1, Output::swiglu, 2 * sizes_.ffn, sizes_.hidden);
      fused_combine(Role::gemm2, sizes_.hidden, sizes_.ffn);
    } else {
      dispatch();
      for (int v = 0; v < topology_.ranks_per_gpu; ++v) {
        product(v, Role::gemm1, Output::swiglu, 2 * sizes_.ffn, sizes_.hidden);
        product(v, Role::gemm2, Output::rows, sizes_.hidden, sizes_.ffn);
      }
      combine();
    }
    const std::vector<int> forward_end = phases_of_all();
    if (backward) {
      pass_ = Pass::backward;
      if (fused_) {
        fused_dispatch(Role::dgrad2, Output::rows_f32, sizes_.ffn, sizes_.hidden);
        for (int v = 0; v < topology_.ranks_per_gpu; ++v) activation_gradient(v);
        fused_combine(Role::dgrad1, sizes_.hidden, 2 * sizes_.ffn);
      } else {
        dispatch();
        for (int v = 0; v < topology_.ranks_per_gpu; ++v) {
          product(v, Role::dgrad2, Output::rows_f32, sizes_.ffn, sizes_.hidden);
          activation_gradient(v);
          product(v, Role::dgrad1, Output::rows, sizes_.hidden, 2 * sizes_.ffn);
        }
        combine();
      }
      for (int v = 0; v < topology_.ranks_per_gpu; ++v) {
        product(v, Role::wgrad2, Output::wgrad_f32, sizes_.hidden, sizes_.ffn);
        product(v, Role::wgrad1, Output::wgrad_f32, 2 * sizes_.ffn, sizes_.hidden);
      }
    }
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      auto& lanes = stretches_[at(gpu)];
      for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
        if (lanes[lane].empty()) continue;
        // Lanes of a GPU's ranks are told apart by the rank of their records.
        e_.add_worker(static_cast<std::int16_t>(lane / kLanes),
                      static_cast<std::uint8_t>(lane % kLanes), std::move(lanes[lane]));
      }
    }
    EventEngine::Result result = e_.run();
    return finish(std::move(result), backward);
  }

 private:
  [[nodiscard]] GpuLimits limits() const {
    return {.sms = static_cast<int>(hw_.sms),
            .shared_bytes = static_cast<std::int64_t>(hw_.shared_bytes),
            .ranks_per_gpu = topology_.ranks_per_gpu};
  }
  [[nodiscard]] const RateCurve& dispatch_curve() const {
    return s_.dispatch == Direction::pull ? hw_.link_pull : hw_.link_push;
  }
  [[nodiscard]] int sms_of_rank() const { return s_.sms / 2 / topology_.ranks_per_gpu * 2; }
  [[nodiscard]] int moving_blocks() const {
    return fused_ ? std::min(sms_of_rank(), (s_.blocks + 1) / 2 * 2) : s_.blocks;
  }
  [[nodiscard]] int gpu_of(int rank) const { return rank / topology_.ranks_per_gpu; }
  [[nodiscard]] Way way_of(int from, int to) const {
    if (from == to) return own;
    if (gpu_of(from) == gpu_of(to)) return near;
    const int node = topology_.gpus_per_node;
    return gpu_of(from) / node == gpu_of(to) / node ? up : out;
  }
  [[nodiscard]] double signal_us(Way way) const {
    return way == out ? hw_.scale_out_us : way == own ? 0 : hw_.signal_us;
  }
  // Of a signal to all ranks; the slowest stands for all.
  [[nodiscard]] double signal_to_all(int rank) const {
    double most = 0;
    for (int to = 0; to < topology_.ranks; ++to) {
      most = std::max(most, signal_us(way_of(rank, to)));
    }
    return most;
  }

  void make_plans(std::span<const std::int64_t> tokens_per_rank,
                  std::span<const std::int32_t> topk_ids) {
    const auto ranks = at(topology_.ranks);
    const auto experts = static_cast<int>(sizes_.experts);
    placement_ = make_contiguous_placement(experts, topology_.ranks);
    std::vector<std::int64_t> splits;
    std::int64_t token = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const auto mine =
          topk_ids.subspan(at(token * sizes_.topk), at(tokens_per_rank[rank] * sizes_.topk));
      ids_.push_back(mine);
      const auto counts = count_splits(mine, sizes_.topk, experts);
      splits.insert(splits.end(), counts.begin(), counts.end());
      token += tokens_per_rank[rank];
    }
    std::int64_t tiles = 0;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      plans_.push_back(make_plan({.rank = static_cast<int>(rank),
                                  .topk = sizes_.topk,
                                  .topk_ids = ids_[rank],
                                  .splits = splits,
                                  .placement = &placement_}));
      pieces_.push_back(row_pieces(plans_.back()));
      const std::int64_t wide = div_up(2 * sizes_.ffn, kTileM) + div_up(sizes_.hidden, kTileM);
      tiles += 2 * wide * static_cast<std::int64_t>(pieces_.back().size());
      tiles += static_cast<std::int64_t>(plans_.back().expert_rows.size()) *
               div_up(3 * sizes_.ffn, kTileM) * div_up(sizes_.hidden, kTileN);
    }
    const std::int64_t pieces = fused_ ? sizes_.tokens * sizes_.topk : sizes_.tokens;
    const std::int64_t chunks =
        std::int64_t{topology_.ranks} * topology_.ranks * div_up(pieces, s_.chunk);
    if (chunks > kMostTasks) {
      throw_invalid(
          "{} chunks between all ranks in a simulated run; up to {} are valid, with larger chunks "
          "or fewer ranks, and the closed form takes any number",
          chunks, kMostTasks);
    }
    if (tiles > kMostTasks) {
      throw_invalid(
          "{} tiles in a simulated run; up to {} are valid, and the closed form takes any number",
          tiles, kMostTasks);
    }
  }

  SimTask task(int rank, Role role, std::int64_t index) const {
    SimTask t;
    t.event.rank = static_cast<std::int16_t>(rank);
    t.event.role = role;
    t.event.pass = pass_;
    t.event.index = static_cast<std::int32_t>(index);
    return t;
  }

  std::vector<EventEngine::Stretch>& lane(int gpu, int sm, std::uint8_t unit) {
    return stretches_[at(gpu)][at(sm) * kLanes + unit];
  }

  // A kernel of a GPU: its lanes begin when the one before has ended. Lanes must all be added
  // between begin_phase and end_phase.
  void begin_phase(int gpu, double launch_us) {
    phase_needs_.clear();
    if (!phase_done_[at(gpu)].empty()) phase_needs_ = {phase_done_[at(gpu)].back()};
    phase_counter_ = e_.add_counter();
    phase_lanes_ = 0;
    phase_launch_us_ = launch_us;
  }
  void add_lane(int gpu, int sm, std::uint8_t unit, int rank, std::vector<int> lists,
                std::vector<Need> more = {}, int ended = -1) {
    EventEngine::Stretch stretch;
    stretch.lists = std::move(lists);
    stretch.needs = phase_needs_;
    stretch.after_us = more.empty() ? phase_launch_us_ : 0;
    stretch.needs.insert(stretch.needs.end(), more.begin(), more.end());
    stretch.rank = static_cast<std::int16_t>(rank);
    stretch.pass = pass_;
    stretch.is_quiet = unit != kProducts || !more.empty();
    stretch.ended = ended >= 0 ? ended : phase_counter_;
    if (ended < 0) ++phase_lanes_;
    lane(gpu, sm, unit).push_back(std::move(stretch));
  }
  void end_phase(int gpu) {
    phase_done_[at(gpu)].push_back({phase_counter_, static_cast<double>(phase_lanes_)});
  }
  [[nodiscard]] std::vector<int> phases_of_all() const {
    std::vector<int> count;
    for (const auto& done : phase_done_) count.push_back(static_cast<int>(done.size()));
    return count;
  }

  [[nodiscard]] int first_rank(int gpu) const { return gpu * topology_.ranks_per_gpu; }
  [[nodiscard]] int ranks_on(int gpu) const {
    return std::min(topology_.ranks_per_gpu, topology_.ranks - first_rank(gpu));
  }

  void plan() {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      begin_phase(gpu, hw_.grid_launch_us);
      for (int v = 0; v < ranks_on(gpu); ++v) {
        const int rank = first_rank(gpu) + v;
        const int list = e_.add_list();
        SimTask t = task(rank, Role::none, -1);
        t.event.kind = TraceKind::plan;
        t.busy_us = hw_.plan_base_us +
                    hw_.plan_pair_us * static_cast<double>(ids_[at(rank)].size()) / s_.blocks +
                    (topology_.ranks > 1 ? signal_to_all(rank) : 0);
        e_.add_task(list, std::move(t));
        add_lane(gpu, v * s_.blocks, kProducts, rank, {list});
      }
      end_phase(gpu);
    }
  }

  // What a warp does for a chunk.
  struct Copies {
    double reads = 0, stores = 0;  // rows, on the own GPU
    double link[kWays] = {};       // rows that cross, by way
    double warps = 1;              // that share it
  };
  void cost(SimTask& t, const Copies& w, int link_gpu, bool signals, const RateCurve& curve,
            const std::vector<int>& links) const {
    const double crossing = w.link[up] + w.link[out];
    const double chunk_us = signals ? hw_.chunk_us : 0;
    t.busy_us = row_ *
                    (w.reads / hw_.warp_read_rate + w.stores / hw_.warp_store_rate +
                     crossing / rate_of_warp(curve)) /
                    w.warps +
                chunk_us;
    if (w.link[up] > 0) t.uses.push_back({links[at(link_gpu)], row_ * w.link[up]});
    if (w.link[out] > 0) t.uses.push_back({out_link_[at(link_gpu)], row_ * w.link[out]});
    t.event.link_bytes = std::llround(row_ * (crossing + w.link[near]));
  }

  // The split dispatch: waves of chunks of tokens.
  void dispatch() {
    const bool pull = s_.dispatch == Direction::pull;
    const bool per_choice = s_.payload == Payload::choice;
    const bool alone = topology_.ranks == 1;
    std::vector<std::vector<int>> arrived(at(topology_.ranks));
    std::vector<int> push_lists, relay_lists;
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      const Plan& p = plans_[at(rank)];
      const int list = e_.add_list();
      push_lists.push_back(list);
      const std::int64_t step = s_.chunk;
      for (std::int64_t first = 0; first < p.num_tokens; first += step) {
        const std::int64_t last = std::min(first + step, p.num_tokens);
        Copies w;
        w.reads = static_cast<double>(last - first);
        for (std::int64_t token = first; token < last; ++token) {
          bool goes_away = false;
          for (int c = 0; c < sizes_.topk; ++c) {
            const std::size_t i = at(token * sizes_.topk + c);
            if (ids_[at(rank)][i] < 0) continue;
            const int to = placement_.rank_of[at(ids_[at(rank)][i])];
            const Way way = way_of(rank, to);
            if (way == own) {
              ++w.stores;
              continue;
            }
            goes_away = true;
            if (pull || (!per_choice && p.first_choices[i] != c)) continue;
            if (way == near) ++w.stores;
            ++w.link[way];
          }
          if (pull && goes_away) ++w.stores;
        }
        SimTask t = task(rank, Role::send, first / s_.chunk);
        cost(t, w, gpu_of(rank), !alone, hw_.link_push, dispatch_link_);
        t.uses.push_back({hbm_[at(gpu_of(rank))], row_ * (w.reads + w.stores)});
        if (!alone) {
          arrived[at(rank)].push_back(e_.add_counter());
          t.raises.push_back({arrived[at(rank)].back(), 1, signal_to_all(rank)});
        }
        e_.add_task(list, std::move(t));
      }
    }
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      const int list = e_.add_list();
      relay_lists.push_back(list);
      const std::int64_t step = s_.chunk;
      std::int64_t most = 0;
      for (const Plan& p : plans_) most = std::max(most, p.num_tokens);
      for (std::int64_t first = 0; first < most && !alone; first += step) {
        for (int i = 1; i < topology_.ranks; ++i) {
          const int source = (rank + i) % topology_.ranks;
          const Plan& p = plans_[at(source)];
          const std::int64_t last = std::min(first + step, p.num_tokens);
          if (first >= last) continue;
          Copies w;
          const Way way = way_of(source, rank);
          for (std::int64_t token = first; token < last; ++token) {
            for (int c = 0; c < sizes_.topk; ++c) {
              const std::size_t j = at(token * sizes_.topk + c);
              const std::int32_t expert = ids_[at(source)][j];
              if (expert < 0 || placement_.rank_of[at(expert)] != rank) continue;
              ++w.stores;
              if (!per_choice && p.first_choices[j] != c) continue;
              if (pull && way != near) {
                ++w.link[way];
              } else {
                ++w.reads;
              }
            }
          }
          SimTask t = task(rank, Role::fanout, first / s_.chunk);
          t.event.peer = static_cast<std::int16_t>(source);
          t.signal = Signal::row_ready;
          cost(t, w, gpu_of(source), true, hw_.link_pull, dispatch_link_);
          t.uses.push_back({hbm_[at(gpu_of(rank))], row_ * (w.reads + w.stores)});
          t.needs.push_back({arrived[at(source)][at(first / step)], 1});
          e_.add_task(list, std::move(t));
        }
      }
    }
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      begin_phase(gpu, hw_.grid_launch_us);
      for (int v = 0; v < ranks_on(gpu); ++v) {
        const int rank = first_rank(gpu) + v;
        for (int b = 0; b < s_.blocks; ++b) {
          for (int warp = 0; warp < (alone ? s_.push_warps : kMoveWarps); ++warp) {
            const bool pushes = warp < s_.push_warps;
            add_lane(gpu, v * s_.blocks + b, static_cast<std::uint8_t>(1 + warp), rank,
                     {(pushes ? push_lists : relay_lists)[at(rank)]});
          }
        }
      }
      end_phase(gpu);
    }
  }

  // Tasks of a product over a rank's rows; `needs_of` is told the piece of each.
  template <typename Adorn>
  void add_tiles(int list, int rank, Role role, Output output, std::int64_t columns,
                 std::int64_t inner, Adorn adorn) {
    const Plan& p = plans_[at(rank)];
    const Groups groups = groups_of(p.expert_rows);
    const GemmWork all = gemm_work(hw_, groups, output, columns, inner);
    const std::int64_t m_tiles = div_up(columns, kTileM);
    const int hbm = hbm_[at(gpu_of(rank))];
    const double hbm_bytes = all.hbm_us * hw_.hbm_rate;
    const auto global = [&](std::int32_t local) {
      return placement_.experts_of[at(rank)][at(local)];
    };
    if (output == Output::wgrad_f32) {
      std::vector<std::int32_t> order(p.expert_rows.size());
      for (std::size_t e = 0; e < order.size(); ++e) order[e] = static_cast<std::int32_t>(e);
      std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return p.expert_rows[at(a)] > p.expert_rows[at(b)];
      });
      const std::int64_t n_tiles = div_up(inner, kTileN);
      const double share =
          1.0 / static_cast<double>(m_tiles * n_tiles) / std::max(1.0, groups.experts);
      for (const std::int32_t e : order) {
        for (std::int64_t i = 0; i < m_tiles * n_tiles; ++i) {
          const double width =
              static_cast<double>(std::min<std::int64_t>(kTileN, inner - i % n_tiles * kTileN)) /
              kTileN;
          SimTask t = task(rank, role, e);
          t.event.part = static_cast<std::int32_t>(i);
          t.event.expert = global(e);
          t.busy_us = hw_.mma_step_us * static_cast<double>(div_up(p.expert_rows[at(e)], kTileK)) *
                          (hw_.narrow_share + (1 - hw_.narrow_share) * width) +
                      hw_.epilogue_f32_us * width;
          t.event.flops = std::llround(2.0 * kTileM * kTileN * width *
                                       static_cast<double>(p.expert_rows[at(e)]));
          t.uses.push_back({hbm, hbm_bytes * share});
          e_.add_task(list, std::move(t));
        }
      }
      return;
    }
    const double epilogue = output == Output::swiglu ? hw_.epilogue_swiglu_us
                            : output == Output::rows ? hw_.epilogue_rows_us
                                                     : hw_.epilogue_f32_us;
    const double chain = hw_.mma_step_us * static_cast<double>(div_up(inner, kTileK));
    std::int64_t index = 0;
    for (const RowPiece& piece : pieces_[at(rank)]) {
      const double width = static_cast<double>(piece.width) / kTileN;
      for (std::int64_t m = 0; m < m_tiles; ++m) {
        const std::int64_t here = std::min<std::int64_t>(kTileM, columns - m * kTileM);
        SimTask t = task(rank, role, index);
        t.event.part = static_cast<std::int32_t>(m);
        t.event.expert = global(piece.local_expert);
        t.busy_us = chain * (hw_.narrow_share + (1 - hw_.narrow_share) * width) + epilogue * width;
        t.event.flops = 2 * here * piece.rows * inner;
        t.uses.push_back({hbm, hbm_bytes * static_cast<double>(piece.width) / (64 * groups.blocks) /
                                   static_cast<double>(m_tiles)});
        adorn(t, piece, here);
        e_.add_task(list, std::move(t));
      }
      ++index;
    }
  }

  void product(int v, Role role, Output output, std::int64_t columns, std::int64_t inner) {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      if (v >= ranks_on(gpu)) continue;
      const int rank = first_rank(gpu) + v;
      const int list = e_.add_list();
      add_tiles(list, rank, role, output, columns, inner,
                [](SimTask&, const RowPiece&, std::int64_t) {});
      begin_phase(gpu, hw_.launch_us);
      for (int sm = 0; sm < s_.sms; ++sm) add_lane(gpu, sm, kProducts, rank, {list});
      end_phase(gpu);
    }
  }

  void activation_gradient(int v) {
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      if (v >= ranks_on(gpu)) continue;
      const int rank = first_rank(gpu) + v;
      const int list = e_.add_list();
      const double bytes = static_cast<double>(plans_[at(rank)].num_rows) *
                           static_cast<double>(sizes_.ffn) * (4 + 4 + 4 + 2);
      for (int sm = 0; sm < s_.sms; ++sm) {
        SimTask t = task(rank, Role::d_activation, sm);
        t.busy_us = bytes / hw_.hbm_rate;  // all SMs together are as fast as the memory
        t.uses.push_back({hbm_[at(gpu)], bytes / s_.sms});
        e_.add_task(list, std::move(t));
      }
      begin_phase(gpu, hw_.launch_us);
      for (int sm = 0; sm < s_.sms; ++sm) add_lane(gpu, sm, kProducts, rank, {list});
      end_phase(gpu);
    }
  }

  // Rows of a rank's buffer that go home to each way, in [first, first + rows).
  void count_home(int rank, const RowPiece& piece, double (&home)[kWays]) const {
    const Plan& p = plans_[at(rank)];
    for (int source = 0; source < topology_.ranks; ++source) {
      const std::size_t run = at(piece.local_expert) * at(topology_.ranks) + at(source);
      const std::int64_t first = std::max(p.run_starts[run], piece.row);
      const std::int64_t last =
          std::min(p.run_starts[run] + p.run_rows[run], piece.row + piece.rows);
      if (first < last) home[way_of(rank, source)] += static_cast<double>(last - first);
    }
  }

  // Reduces a rank's tokens with `warps` warps of `blocks` blocks.
  void add_reduces(int list, int rank, int blocks, int warps_of_block,
                   const std::vector<Need>& needs) {
    const Plan& p = plans_[at(rank)];
    const std::int64_t tokens = p.num_tokens;
    const std::int64_t warps = std::int64_t{blocks} * warps_of_block;
    const std::int64_t per_warp = div_up(tokens, warps);
    const bool pull = s_.combine == Direction::pull;
    double near_rows = 0, links[kWays] = {};
    for (const std::int32_t id : ids_[at(rank)]) {
      if (id < 0) continue;
      const Way way = way_of(rank, placement_.rank_of[at(id)]);
      if (pull && (way == up || way == out)) {
        ++links[way];
      } else {
        ++near_rows;
      }
    }
    for (int b = 0; b < blocks; ++b) {
      const std::int64_t first = b * per_warp * warps_of_block;
      const std::int64_t last = std::min(first + per_warp * warps_of_block, tokens);
      if (first >= last) break;
      const double share = static_cast<double>(last - first) / static_cast<double>(tokens);
      const double of_warp = static_cast<double>(per_warp) / static_cast<double>(tokens);
      SimTask t = task(rank, Role::reduce, b);
      t.needs = needs;
      t.signal = Signal::return_ready;
      t.busy_us = row_ * of_warp *
                  (near_rows / hw_.warp_reduce_rate +
                   (links[up] + links[out]) / rate_of_warp(hw_.link_pull));
      t.uses.push_back(
          {hbm_[at(gpu_of(rank))], row_ * share * (near_rows + static_cast<double>(tokens))});
      if (links[up] > 0) {
        t.uses.push_back({combine_link_[at(gpu_of(rank))], row_ * share * links[up]});
      }
      if (links[out] > 0) {
        t.uses.push_back({out_link_[at(gpu_of(rank))], row_ * share * links[out]});
      }
      t.event.link_bytes = std::llround(row_ * share * (links[up] + links[out]));
      e_.add_task(list, std::move(t));
    }
  }

  void combine() {
    const bool pull = s_.combine == Direction::pull;
    const bool alone = topology_.ranks == 1;
    std::vector<int> lists;
    std::vector<Need> returned;
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      returned.push_back({e_.add_counter(), static_cast<double>(s_.blocks)});
    }
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      const int list = e_.add_list();
      lists.push_back(list);
      double home[kWays] = {};
      for (const RowPiece& piece : pieces_[at(rank)]) count_home(rank, piece, home);
      for (int b = 0; b < s_.blocks && !alone; ++b) {
        SimTask t = task(rank, Role::send, b);
        if (!pull) {
          Copies w;
          w.warps = s_.blocks * kMoveWarps;
          w.reads = home[near] + home[up] + home[out];
          w.stores = home[near];
          w.link[near] = home[near];
          w.link[up] = home[up];
          w.link[out] = home[out];
          cost(t, w, gpu_of(rank), false, hw_.link_push, combine_link_);
          for (Use& use : t.uses) use.bytes /= s_.blocks;
          t.uses.push_back({hbm_[at(gpu_of(rank))], row_ * 2 * w.reads / s_.blocks});
          t.event.link_bytes /= s_.blocks;
        }
        t.raises.push_back({returned[at(rank)].counter, 1, signal_to_all(rank)});
        e_.add_task(list, std::move(t));
      }
      add_reduces(list, rank, s_.blocks, kMoveWarps, alone ? std::vector<Need>{} : returned);
    }
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      begin_phase(gpu, hw_.grid_launch_us);
      for (int v = 0; v < ranks_on(gpu); ++v) {
        for (int b = 0; b < s_.blocks; ++b) {
          const int rank = first_rank(gpu) + v;
          add_lane(gpu, v * s_.blocks + b, kProducts, rank, {lists[at(rank)]});
        }
      }
      end_phase(gpu);
    }
  }

  // Entries of `source`'s send_order for experts of `to`.
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> entries(int source, int to) const {
    const auto& experts = placement_.experts_of[at(to)];
    if (experts.empty()) return {0, 0};
    const Plan& p = plans_[at(source)];
    return {p.send_starts[at(experts.front())], p.send_starts[at(experts.back()) + 1]};
  }

  // What a chunk of entries brings to the rank that owns their experts.
  struct Brought {
    double rows = 0;                        // that travel
    double places = 0;                      // that they fill
    std::map<std::int64_t, double> groups;  // by group of 64 rows
  };
  [[nodiscard]] Brought bring(int source, int to, std::int64_t first, std::int64_t last) const {
    const Plan& p = plans_[at(source)];
    Brought b;
    const auto place = [&](std::size_t i) {
      ++b.places;
      ++b.groups[p.slots[i] / 64];
    };
    for (std::int64_t entry = first; entry < last; ++entry) {
      const std::size_t i = at(p.send_order[at(entry)]);
      const std::size_t token = i / at(sizes_.topk) * at(sizes_.topk);
      if (s_.payload == Payload::choice) {
        ++b.rows;
        place(i);
      } else if (p.first_choices[i] == i - token) {
        ++b.rows;
        for (std::size_t j = token; j < token + at(sizes_.topk); ++j) {
          const std::int32_t expert = ids_[at(source)][j];
          if (expert >= 0 && placement_.rank_of[at(expert)] == to) place(j);
        }
      }
    }
    return b;
  }

  void fused_dispatch(Role role, Output output, std::int64_t columns, std::int64_t inner) {
    const bool alone = topology_.ranks == 1;
    const int ranks = topology_.ranks;
    std::vector<std::vector<int>> groups(at(ranks));  // counters of arrived rows
    for (int rank = 0; rank < ranks; ++rank) {
      for (std::int64_t g = 0; g < plans_[at(rank)].padded_rows() / 64; ++g) {
        groups[at(rank)].push_back(e_.add_counter());
      }
    }
    std::vector<int> push_lists, relay_lists, tile_lists;
    const std::int64_t step = s_.chunk;
    std::vector<std::vector<int>> arrived(at(ranks) * at(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const int list = e_.add_list();
      push_lists.push_back(list);
      bool more = true;
      for (std::int64_t offset = 0; more; offset += step) {
        more = false;
        for (int i = 0; i < ranks; ++i) {
          const int to = (rank + i) % ranks;
          const auto [begin, end] = entries(rank, to);
          const std::int64_t first = begin + offset, last = std::min(first + step, end);
          if (first >= last) continue;
          more = true;
          const Brought b = bring(rank, to, first, last);
          const Way way = way_of(rank, to);
          Copies w;
          w.reads = b.rows;
          w.stores = way == own ? b.places : way == near ? b.rows : 0;
          if (way != own) w.link[way] = b.rows;
          SimTask t = task(rank, Role::send, offset / s_.chunk);
          t.event.peer = static_cast<std::int16_t>(to);
          cost(t, w, gpu_of(rank), !alone, hw_.link_push, dispatch_link_);
          t.uses.push_back({hbm_[at(gpu_of(rank))], row_ * (w.reads + w.stores)});
          if (way == own) {
            for (const auto& [group, rows] : b.groups) {
              t.raises.push_back({groups[at(rank)][at(group)], rows, 0});
            }
          } else {
            auto& counters = arrived[at(rank) * at(ranks) + at(to)];
            counters.push_back(e_.add_counter());
            t.raises.push_back({counters.back(), 1, signal_us(way)});
          }
          e_.add_task(list, std::move(t));
        }
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      const int list = e_.add_list();
      relay_lists.push_back(list);
      bool more = true;
      for (std::int64_t offset = 0; more; offset += step) {
        more = false;
        for (int i = 1; i < ranks; ++i) {
          const int source = (rank + i) % ranks;
          const auto [begin, end] = entries(source, rank);
          const std::int64_t first = begin + offset, last = std::min(first + step, end);
          if (first >= last) continue;
          more = true;
          const Brought b = bring(source, rank, first, last);
          Copies w;
          w.reads = b.rows;
          w.stores = b.places;
          SimTask t = task(rank, Role::fanout, offset / s_.chunk);
          t.event.peer = static_cast<std::int16_t>(source);
          t.signal = Signal::row_ready;
          cost(t, w, gpu_of(rank), true, hw_.link_push, dispatch_link_);
          t.uses.push_back({hbm_[at(gpu_of(rank))], row_ * (w.reads + w.stores)});
          const auto& counters = arrived[at(source) * at(ranks) + at(rank)];
          t.needs.push_back({counters[at(offset / step)], 1});
          for (const auto& [group, rows] : b.groups) {
            t.raises.push_back({groups[at(rank)][at(group)], rows, 0});
          }
          e_.add_task(list, std::move(t));
        }
      }
      const int tiles = e_.add_list();
      tile_lists.push_back(tiles);
      add_tiles(tiles, rank, role, output, columns, inner,
                [&](SimTask& t, const RowPiece& piece, std::int64_t) {
                  t.signal = Signal::tile_ready;
                  for (std::int64_t row = 0; row < piece.rows; row += 64) {
                    t.needs.push_back(
                        {groups[at(rank)][at((piece.row + row) / 64)],
                         static_cast<double>(std::min<std::int64_t>(64, piece.rows - row))});
                  }
                });
    }
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      begin_phase(gpu, hw_.grid_launch_us);
      for (int v = 0; v < ranks_on(gpu); ++v) {
        const int rank = first_rank(gpu) + v;
        for (int b = 0; b < sms_of_rank(); ++b) {
          const int sm = v * sms_of_rank() + b;
          if (b >= moving_blocks()) {
            add_lane(gpu, sm, kProducts, rank, {tile_lists[at(rank)]});
            continue;
          }
          // Movers multiply when there is nothing left to move.
          const int moved = e_.add_counter();
          for (int warp = 0; warp < kFusedWarps; ++warp) {
            std::vector<int> both{relay_lists[at(rank)]};
            if (warp < s_.push_warps) both.insert(both.begin(), push_lists[at(rank)]);
            add_lane(gpu, sm, static_cast<std::uint8_t>(1 + warp), rank, both, {}, moved);
          }
          add_lane(gpu, sm, kProducts, rank, {tile_lists[at(rank)]}, {{moved, kFusedWarps}});
        }
      }
      end_phase(gpu);
    }
  }

  void fused_combine(Role role, std::int64_t columns, std::int64_t inner) {
    std::vector<Need> returned;
    std::vector<int> lists;
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      const auto tiles = static_cast<double>(pieces_[at(rank)].size()) *
                         static_cast<double>(div_up(columns, kTileM));
      returned.push_back({e_.add_counter(), tiles});
    }
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      const int list = e_.add_list();
      lists.push_back(list);
      const int gpu = gpu_of(rank);
      const double delay = signal_to_all(rank);
      add_tiles(list, rank, role, Output::rows, columns, inner,
                [&](SimTask& t, const RowPiece& piece, std::int64_t here) {
                  double home[kWays] = {};
                  count_home(rank, piece, home);
                  const double bytes = static_cast<double>(here) * 2;
                  if (home[up] > 0) t.uses.push_back({combine_link_[at(gpu)], bytes * home[up]});
                  if (home[out] > 0) t.uses.push_back({out_link_[at(gpu)], bytes * home[out]});
                  t.event.link_bytes = std::llround(bytes * (home[near] + home[up] + home[out]));
                  t.raises.push_back({returned[at(rank)].counter, 1, delay});
                });
      add_reduces(list, rank, sms_of_rank(), kConsumerWarps, returned);
    }
    for (int gpu = 0; gpu < num_gpus_; ++gpu) {
      begin_phase(gpu, hw_.grid_launch_us);
      for (int v = 0; v < ranks_on(gpu); ++v) {
        const int rank = first_rank(gpu) + v;
        for (int b = 0; b < sms_of_rank(); ++b) {
          add_lane(gpu, v * sms_of_rank() + b, kProducts, rank, {lists[at(rank)]});
        }
      }
      end_phase(gpu);
    }
  }

  EventRun finish(EventEngine::Result result, bool backward) const {
    EventRun run;
    std::vector<std::int64_t> ends(at(topology_.ranks) * 2, 0);
    std::int64_t forward_end = 0;
    for (const TraceEvent& event : result.events) {
      if (event.kind == TraceKind::wait) continue;
      auto& end = ends[at(event.rank) * 2 + (event.pass == Pass::backward ? 1 : 0)];
      end = std::max(end, event.end_ns);
      if (event.pass == Pass::forward) forward_end = std::max(forward_end, event.end_ns);
    }
    run.forward_us = static_cast<double>(forward_end) / 1e3;
    if (backward) run.backward_us = result.end_us - run.forward_us;
    run.trace.events = std::move(result.events);
    for (int rank = 0; rank < topology_.ranks; ++rank) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (pass == Pass::backward && !backward) continue;
        TraceEvent event;
        event.kind = TraceKind::operation;
        event.rank = static_cast<std::int16_t>(rank);
        event.pass = pass;
        event.start_ns = pass == Pass::backward ? ends[at(rank) * 2] : 0;
        event.end_ns = std::max(event.start_ns, ends[at(rank) * 2 + (pass == Pass::backward)]);
        run.trace.events.push_back(event);
      }
    }
    std::stable_sort(run.trace.events.begin(), run.trace.events.end(),
                     [](const TraceEvent& a, const TraceEvent& b) {
                       return std::tuple(a.pass, a.rank, a.worker, a.end_ns) <
                              std::tuple(b.pass, b.rank, b.worker, b.end_ns);
                     });
    return run;
  }

  const Hardware& hw_;
  LayerSizes sizes_;
  Topology topology_;
  CudaSchedule s_;
  double row_ = 0;
  bool fused_ = false;
  int num_gpus_ = 1;
  Pass pass_ = Pass::forward;
  Placement placement_;
  std::vector<std::span<const std::int32_t>> ids_;
  std::vector<Plan> plans_;
  std::vector<std::vector<RowPiece>> pieces_;  // of each rank
  EventEngine e_;
  std::vector<int> hbm_, dispatch_link_, combine_link_, out_link_;  // resources of each GPU
  // [GPU][SM and unit] what the lane does, kernel after kernel.
  std::vector<std::vector<std::vector<EventEngine::Stretch>>> stretches_;
  std::vector<std::vector<Need>> phase_done_;  // [GPU] of each kernel so far
  std::vector<Need> phase_needs_;
  int phase_counter_ = 0, phase_lanes_ = 0;
  double phase_launch_us_ = 0;
};

}  // namespace

EventRun run_events(const Hardware& hardware, const LayerSizes& sizes, const Topology& topology,
                    const CudaSchedule& schedule, std::span<const std::int64_t> tokens_per_rank,
                    std::span<const std::int32_t> topk_ids, bool backward) {
  if (topology.ranks > kMaxEventRanks) {
    throw_invalid("{} ranks in a simulated run; 1 to {} are valid, and the closed form takes 1024",
                  topology.ranks, kMaxEventRanks);
  }
  // Checks sizes, ids and that both agree.
  const Load load = load_of(sizes, topology, tokens_per_rank, topk_ids);
  const Scorer scorer(hardware, load);
  if (const auto reason = why_illegal(schedule, load.sizes, scorer.limits())) {
    throw_invalid("{}", *reason);
  }
  return Builder(hardware, load.sizes, topology, schedule, tokens_per_rank, topk_ids).run(backward);
}

}  // namespace uniep::simulate
