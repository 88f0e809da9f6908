// SPDX-License-Identifier: Apache-2.0
#include "simulate/score.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace uniep::simulate {
namespace {

// Of the kernels: src/cuda/split_args.hpp, fused_args.hpp, grouped_gemm_args.hpp.
constexpr double kMoveWarps = 16;   // of a block that moves rows
constexpr double kFusedWarps = 12;  // the same in a fused kernel
constexpr double kConsumerWarps = 8;
constexpr double kTileM = 128, kTileN = 256, kTileK = 64;

// Where the whole is a multiple but for rounding, it takes no tile more.
double whole(double x) { return std::ceil(x - 1e-9); }
double tiles_of(std::int64_t extent, double tile) {
  return std::ceil(static_cast<double>(extent) / tile);
}
double sum(const ByWay& ways) { return ways[own] + ways[near] + ways[up] + ways[out]; }
double larger(const ByWay& a, const ByWay& b, Way way) { return std::max(a[way], b[way]); }

// Pieces that warps take one by one: how much longer the last one works than the average.
double imbalance(double pieces, double warps) {
  return pieces <= 0 ? 1 : whole(pieces / warps) * warps / pieces;
}

// Bytes per microsecond of a few warps, which do not yet get in each other's way.
double rate_of_warp(const RateCurve& curve) {
  return curve.points().front().second / curve.points().front().first;
}

// The time of products whose rows arrive meanwhile, over the share u of rows that products are at:
// of the moving, 1 - (1 - u)^fan must be done by then, of the products 1 - u are still to do. The
// latest of these ends decides.
double overlapped(double move_us, double products_us, double fan, double last_us) {
  double most = std::max(products_us, move_us + last_us);
  if (fan > 1 && products_us < fan * move_us) {
    const double left = std::pow(products_us / (fan * move_us), 1 / (fan - 1));  // 1 - u
    most = std::max(most, move_us * (1 - std::pow(left, fan)) + left * products_us);
  }
  return most;
}

}  // namespace

Parts& Parts::operator+=(const Parts& other) {
  for (const auto& [name, part] : kParts) this->*part += other.*part;
  return *this;
}

std::string_view limit_of(const Parts& parts) {
  const auto most = std::max_element(kParts.begin(), kParts.end(), [&](auto& a, auto& b) {
    return parts.*a.second < parts.*b.second;
  });
  return most->first;
}

// Rows on their way to their experts, of one rank, while all ranks of its GPU do the same.
struct Scorer::Moves {
  double local_us = 0;   // a pusher's copies inside the GPU
  double remote_us = 0;  // and its stores to, or a relay's loads from, other GPUs
  double relay_us = 0;   // a relay's copies inside the GPU
  double link_us = 0;    // the busiest link
  double hbm_us = 0;
  double push_chunk_us = 0;  // a pusher's average chunk
  double chunk_us = 0;       // a relay's: what follows the last one's arrival
  double warps_us = 0;       // work of a warp, added up over all
  bool is_pull = false;

  // As parts, for the time that movers take; `shared`: all warps can do all of it.
  [[nodiscard]] Parts parts(double shared_us = 0) const {
    const double push = local_us + (is_pull ? 0 : remote_us);
    const double relay = relay_us + (is_pull ? remote_us : 0);
    const double most = std::max({push, relay, link_us, hbm_us, shared_us});
    Parts p;
    p.hbm = chunk_us;
    const double remote = most == push && !is_pull   ? remote_us
                          : most == relay && is_pull ? remote_us
                                                     : 0;
    p.link = most == link_us ? most : remote;
    p.hbm += most - p.link;
    return p;
  }
};

Scorer::Scorer(const Hardware& hardware, const Load& load) : hw_(hardware), load_(load) {
  if (load.sizes.dtype != DType::bf16) {
    throw_invalid("only bf16 layers can be scored; there are no figures for other dtypes");
  }
  row_bytes_ = static_cast<double>(load.sizes.hidden) * 2;
  on_gpu_ = load.topology.ranks_per_gpu;
  const std::int64_t h = load.sizes.hidden, f = load.sizes.ffn;
  const auto set = [this](Gemm gemm, Output output, std::int64_t columns, std::int64_t inner) {
    work_[static_cast<std::size_t>(gemm)] = gemm_work(hw_, load_.groups, output, columns, inner);
  };
  set(Gemm::gemm1, Output::swiglu, 2 * f, h);
  set(Gemm::gemm2, Output::rows, h, f);
  set(Gemm::dgrad2, Output::rows_f32, f, h);
  set(Gemm::dgrad1, Output::rows, h, 2 * f);
  set(Gemm::wgrad2, Output::wgrad_f32, h, f);
  set(Gemm::wgrad1, Output::wgrad_f32, 2 * f, h);
  // Reads h and f32 gradients, writes gradients of h and the activation.
  activation_gradient_us_ =
      load.groups.rows * static_cast<double>(load.sizes.ffn) * (4 + 4 + 4 + 2) / hw_.hbm_rate;
}

GpuLimits Scorer::limits() const {
  return {.sms = static_cast<int>(hw_.sms),
          .shared_bytes = static_cast<std::int64_t>(hw_.shared_bytes),
          .ranks_per_gpu = load_.topology.ranks_per_gpu};
}

GemmWork gemm_work(const Hardware& hw, const Groups& g, Output output, std::int64_t columns,
                   std::int64_t inner) {
  const auto m = static_cast<double>(columns), n = static_cast<double>(inner);
  GemmWork work;
  if (output == Output::wgrad || output == Output::wgrad_f32 || output == Output::main_grad) {
    const double tiles = tiles_of(columns, kTileM) * tiles_of(inner, kTileN);
    const double width =
        hw.narrow_share * tiles_of(inner, kTileN) + (1 - hw.narrow_share) * n / kTileN;
    const double epilogue = output == Output::wgrad       ? hw.epilogue_wgrad_us
                            : output == Output::wgrad_f32 ? hw.epilogue_f32_us
                                                          : hw.epilogue_main_us;
    const double bytes = output == Output::wgrad ? 2 : output == Output::wgrad_f32 ? 4 : 8;
    work.total_us = tiles_of(columns, kTileM) *
                    (hw.mma_step_us * width * g.blocks + epilogue * n / kTileN * g.experts);
    // Longest experts first, so the last wave has the shortest tiles; the average stands for them.
    if (g.experts > 0) work.tile_us = work.total_us / g.experts / tiles;
    work.hbm_us = (g.rows * (m + n) * 2 + g.experts * m * n * bytes) / hw.hbm_rate;
    return work;
  }
  const double epilogue = output == Output::rows     ? hw.epilogue_rows_us
                          : output == Output::swiglu ? hw.epilogue_swiglu_us
                                                     : hw.epilogue_f32_us;
  const double bytes = output == Output::rows ? 2 : output == Output::swiglu ? 3 : 4;
  const double chain = hw.mma_step_us * tiles_of(inner, kTileK);
  const auto cost = [&](double tiles, double rows) {
    return chain * (hw.narrow_share * tiles + (1 - hw.narrow_share) * rows / kTileN) +
           epilogue * rows / kTileN;
  };
  work.total_us = tiles_of(columns, kTileM) * cost(g.tiles, 64 * g.blocks);
  work.tile_us = g.rows > 0 ? cost(1, g.widest) : 0;
  const double used = std::min(g.experts, g.rows);  // experts whose weights are read
  work.hbm_us = (used * m * n * 2 + g.rows * (n * 2 + m * bytes)) / hw.hbm_rate;
  return work;
}

Parts gemm_time(const Hardware& hw, const GemmWork& work, double sms, double moving_us) {
  Parts p;
  if (work.total_us <= 0) return p;
  p.tensor = work.total_us / sms;
  const double waves = p.tensor / work.tile_us;
  const double idle =
      std::max(work.tile_us - p.tensor, hw.tail_share * work.tile_us * (whole(waves) - waves));
  p.tail = std::max(0.0, idle - moving_us);  // other work fills what the last wave leaves
  p.hbm = std::max(0.0, work.hbm_us - p.tensor - p.tail - moving_us);
  return p;
}

Parts Scorer::product(Gemm gemm, int sms) const {
  return gemm_time(hw_, work_[static_cast<std::size_t>(gemm)], sms == 0 ? hw_.sms : sms);
}

double Scorer::sms_of(const CudaSchedule& s) const { return s.sms == 0 ? hw_.sms : s.sms; }

int Scorer::blocks_of(const CudaSchedule& s) const {
  return s.blocks == 0 ? default_blocks(limits()) : s.blocks;
}

Parts Scorer::plan(int blocks) const {
  const double pairs = static_cast<double>(load_.sizes.tokens) * load_.sizes.topk;
  Parts p;
  p.latency = hw_.grid_launch_us + hw_.plan_base_us + hw_.plan_pair_us * pairs / blocks;
  if (load_.topology.ranks > 1) p.latency += hw_.signal_us;
  return p;
}

Scorer::Moves Scorer::moves(const CudaSchedule& s, double pushers, double relays) const {
  const bool per_choice = s.payload == Payload::choice;
  const bool pull = s.dispatch == Direction::pull;
  const ByWay& sent = per_choice ? load_.choices : load_.rows;
  const ByWay& got = per_choice ? load_.in_choices : load_.in_rows;
  const auto tokens = static_cast<double>(load_.sizes.tokens);
  const double row = row_bytes_;
  const double peers = load_.topology.ranks - 1;
  Moves m;
  m.is_pull = pull;
  // A pusher reads a row once and stores it to all its targets.
  const double published = pull && peers > 0 ? tokens : 0;
  const double stored = load_.choices[own] + (pull ? published : sent[near]);
  // Split, a token is read once for all its targets; fused, each entry of the order by itself.
  const double reads = s.fusion == Fusion::fused ? sum(sent) : tokens;
  const double push_work = row * (reads / hw_.warp_read_rate + stored / hw_.warp_store_rate);
  const double pieces = s.fusion == Fusion::fused ? tokens * load_.sizes.topk : tokens;
  const double chunks = std::ceil(pieces / s.chunk);
  const double push_uneven = imbalance(chunks, pushers);
  const double signals = peers > 0 ? hw_.chunk_us * chunks : 0;
  m.local_us = (push_work + signals) * push_uneven / pushers;
  const double placed = load_.in_choices[near] + load_.in_choices[up] + load_.in_choices[out];
  const double read = got[near] + (pull ? 0 : got[up] + got[out]);
  const double relay_work = row * (read / hw_.warp_read_rate + placed / hw_.warp_store_rate);
  const double in_chunks = chunks * peers;
  const double relay_uneven = imbalance(in_chunks, relays);
  const double in_signals = hw_.chunk_us * in_chunks;
  m.relay_us = (relay_work + in_signals) * relay_uneven / relays;
  m.chunk_us = in_chunks > 0 ? (relay_work + in_signals) / in_chunks : 0;
  const RateCurve& curve = pull ? hw_.link_pull : hw_.link_push;
  const double movers = pull ? relays : pushers;
  const double crossing = pull ? got[up] + got[out] : sent[up] + sent[out];
  const double remote_work = row * crossing / rate_of_warp(curve);
  m.remote_us = remote_work / movers;
  m.push_chunk_us = (push_work + signals + (pull ? 0 : remote_work)) / std::max(1.0, chunks);
  m.warps_us = push_work + signals + relay_work + in_signals + remote_work;
  const double link_bytes = on_gpu_ * row * larger(sent, got, up);
  m.link_us = link_bytes / curve.at(movers * on_gpu_);
  m.link_us = std::max(m.link_us, on_gpu_ * row * larger(sent, got, out) / hw_.scale_out_rate);
  // Written once where they arrive and once where they are used; what has just arrived is read from
  // the cache.
  const double arrived = pull ? published : got[near] + got[up] + got[out];
  m.hbm_us = on_gpu_ * row * (tokens + arrived + load_.groups.rows) / hw_.hbm_rate;
  return m;
}

Parts Scorer::dispatch(const CudaSchedule& s) const {
  const double blocks = blocks_of(s);
  Parts p = moves(s, blocks * s.push_warps, blocks * (kMoveWarps - s.push_warps)).parts();
  p.latency = hw_.grid_launch_us;
  if (load_.topology.ranks > 1) {
    p.latency += load_.choices[out] > 0 ? hw_.scale_out_us : hw_.signal_us;
  }
  return p;
}

Parts Scorer::combine(const CudaSchedule& s) const {
  const double warps = blocks_of(s) * kMoveWarps;
  const bool pull = s.combine == Direction::pull;
  const ByWay& home = load_.choices;
  const ByWay& away = load_.in_choices;
  const double row = row_bytes_;
  const auto tokens = static_cast<double>(load_.sizes.tokens);
  const RateCurve& curve = pull ? hw_.link_pull : hw_.link_push;
  const double link_us =
      std::max(on_gpu_ * row * larger(home, away, up) / curve.at(warps * on_gpu_),
               on_gpu_ * row * larger(home, away, out) / hw_.scale_out_rate);
  Parts p;
  p.latency = hw_.grid_launch_us;
  const double uneven = imbalance(tokens, warps);
  const double remote_rate = rate_of_warp(curve);
  if (pull) {
    const double near_us = row * (home[own] + home[near]) * uneven / warps / hw_.warp_reduce_rate;
    const double far_us = row * (home[up] + home[out]) * uneven / warps / remote_rate;
    const double hbm_us = on_gpu_ * row * (sum(home) + tokens) / hw_.hbm_rate;
    const double most = std::max({near_us + far_us, link_us, hbm_us});
    p.link = most == link_us ? most : most == hbm_us ? 0 : far_us;
    p.hbm = most - p.link;
  } else {
    const double near_us = row * away[near] / warps / hw_.warp_store_rate +
                           row * (sum(away) - away[own]) / warps / hw_.warp_read_rate;
    const double far_us = row * (away[up] + away[out]) / warps / remote_rate;
    const double return_hbm_us =
        on_gpu_ * row * 2 * (away[near] + away[up] + away[out]) / hw_.hbm_rate;
    const double most = std::max({near_us + far_us, link_us, return_hbm_us});
    p.link = most == link_us ? most : most == return_hbm_us ? 0 : far_us;
    p.hbm = most - p.link;
    const double reduce_us = row * sum(home) * uneven / warps / hw_.warp_reduce_rate;
    p.hbm += std::max(reduce_us, on_gpu_ * row * (sum(home) + tokens) / hw_.hbm_rate);
  }
  if (load_.topology.ranks > 1) {
    p.latency += home[out] > 0 ? hw_.scale_out_us : hw_.signal_us;
  }
  return p;
}

Parts Scorer::split_products(const CudaSchedule& s, Gemm gemm) const {
  Parts p = gemm_time(hw_, work_[static_cast<std::size_t>(gemm)], sms_of(s));
  p.latency += hw_.launch_us;
  for (const auto& [name, part] : kParts) p.*part *= on_gpu_;  // one rank after the other
  return p;
}

Parts Scorer::fused_dispatch(const CudaSchedule& s, const GemmWork& work) const {
  const double sms = std::floor(sms_of(s) / 2 / on_gpu_) * 2;
  const double blocks = std::min(sms, std::ceil(blocks_of(s) / 2.0) * 2);
  const Moves m = moves(s, blocks * s.push_warps, blocks * (kFusedWarps - s.push_warps));
  // Pushers that are done fan out, so a relay waits for nobody but its rows.
  Moves shared = m;
  shared.relay_us = shared.chunk_us = 0;
  Parts moving = shared.parts(m.warps_us / (blocks * kFusedWarps));
  const double move_us = moving.total();
  // Places that a row fills where it arrives. Rows go with the lowest of their experts, so early
  // chunks are full of rows and late ones nearly empty.
  const double places = sum(load_.in_choices);
  const double fan = s.payload == Payload::choice || places <= 0
                         ? 1
                         : std::max(1.0, places / std::max(1.0, sum(load_.in_rows)));
  const double start_us = std::min(fan * (m.push_chunk_us + m.chunk_us), move_us + m.chunk_us);
  const double share = blocks / sms;  // of the SMs' time until movers multiply, too
  Parts p = gemm_time(hw_, work, sms, share * move_us);
  const double products = p.total() + share * move_us;
  const double exposed =
      start_us + overlapped(std::max(0.0, move_us - start_us), products, fan, work.tile_us) -
      p.total();
  moving.hbm += 1e-9;  // where nothing moves, nothing is exposed
  p.link += exposed * moving.link / moving.total();
  p.hbm += exposed * moving.hbm / moving.total();
  // Both share the memory.
  const double hbm_us = on_gpu_ * work.hbm_us + m.hbm_us;
  p.hbm += std::max(0.0, hbm_us - p.total());
  p.latency += hw_.grid_launch_us;
  if (load_.topology.ranks > 1) {
    p.latency += load_.choices[out] > 0 ? hw_.scale_out_us : hw_.signal_us;
  }
  return p;
}

Parts Scorer::fused_combine(const CudaSchedule& s, const GemmWork& work) const {
  const double sms = std::floor(sms_of(s) / 2 / on_gpu_) * 2;
  const ByWay& home = load_.choices;
  const ByWay& away = load_.in_choices;
  const double row = row_bytes_;
  const auto tokens = static_cast<double>(load_.sizes.tokens);
  const double link_us =
      std::max(on_gpu_ * row * larger(home, away, up) /
                   (hw_.link_push.at(kConsumerWarps * sms * on_gpu_) * hw_.link_short_share),
               on_gpu_ * row * larger(home, away, out) / hw_.scale_out_rate);
  Parts p = gemm_time(hw_, work, sms);
  p.hbm += std::max(0.0, on_gpu_ * work.hbm_us - p.total());
  // The last tile's rows leave when it is finished; all before it leave while others multiply.
  p.link += std::max(0.0, link_us - p.total());
  const double warps = kConsumerWarps * sms;
  const double reduce_us =
      row * sum(home) * imbalance(tokens, warps) / warps / hw_.warp_reduce_rate;
  p.hbm += std::max(reduce_us, on_gpu_ * row * (sum(home) + tokens) / hw_.hbm_rate);
  p.latency += hw_.grid_launch_us;
  if (load_.topology.ranks > 1) p.latency += home[out] > 0 ? hw_.scale_out_us : hw_.signal_us;
  return p;
}

Parts Scorer::forward(const CudaSchedule& s, std::vector<StageTime>* stages) const {
  Parts all;
  const auto add = [&](const char* name, const Parts& parts) {
    all += parts;
    if (stages != nullptr) stages->push_back({name, parts});
  };
  add("plan", plan(blocks_of(s)));
  if (s.fusion == Fusion::fused) {
    add("dispatch + gemm1", fused_dispatch(s, work_[static_cast<std::size_t>(Gemm::gemm1)]));
    add("gemm2 + combine", fused_combine(s, work_[static_cast<std::size_t>(Gemm::gemm2)]));
    return all;
  }
  add("dispatch", dispatch(s));
  add("gemm1", split_products(s, Gemm::gemm1));
  add("gemm2", split_products(s, Gemm::gemm2));
  add("combine", combine(s));
  return all;
}

Parts Scorer::backward(const CudaSchedule& s, std::vector<StageTime>* stages) const {
  Parts all;
  const auto add = [&](const char* name, const Parts& parts) {
    all += parts;
    if (stages != nullptr) stages->push_back({name, parts});
  };
  Parts gradient;
  gradient.hbm = on_gpu_ * activation_gradient_us_;
  gradient.latency = on_gpu_ * hw_.launch_us;
  if (s.fusion == Fusion::fused) {
    add("dispatch + dgrad2", fused_dispatch(s, work_[static_cast<std::size_t>(Gemm::dgrad2)]));
    add("d_activation", gradient);
    add("dgrad1 + combine", fused_combine(s, work_[static_cast<std::size_t>(Gemm::dgrad1)]));
  } else {
    add("dispatch", dispatch(s));
    add("dgrad2", split_products(s, Gemm::dgrad2));
    add("d_activation", gradient);
    add("dgrad1", split_products(s, Gemm::dgrad1));
    add("combine", combine(s));
  }
  add("wgrad2", split_products(s, Gemm::wgrad2));
  add("wgrad1", split_products(s, Gemm::wgrad1));
  return all;
}

}  // namespace uniep::simulate
