// SPDX-License-Identifier: Apache-2.0
#include "simulate/cpu_score.hpp"

#include <algorithm>
#include <cmath>

#include "topo/placement.hpp"

namespace uniep::simulate {
namespace {

// Of a product's time on a tile of 64 x 128, what packing its operands takes; it goes with the
// tile's rim, products with its area.
constexpr double kPackShare = 0.15;
constexpr double kUnitRim = 1.0 / 64 + 1.0 / 128;
constexpr std::int64_t kPanel = 12;  // rows of a register block; a tile's rows are rounded up

double div_up(double a, double b) { return std::ceil(a / b); }

}  // namespace

CpuScorer::CpuScorer(const CpuMachine& machine, const LayerSizes& sizes,
                     std::span<const std::int64_t> expert_rows, bool backward)
    : machine_(machine),
      sizes_(sizes),
      expert_rows_(expert_rows.begin(), expert_rows.end()),
      backward_(backward) {
  double most = 0;
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    double mine = 0;
    const std::int64_t first = share_start(sizes.experts, sizes.ranks, rank);
    for (std::int64_t e = first; e < first + share_size(sizes.experts, sizes.ranks, rank); ++e) {
      mine += static_cast<double>(expert_rows_[static_cast<std::size_t>(e)]);
    }
    rows_ += mine;
    most = std::max(most, mine);
  }
  if (rows_ > 0) busiest_ = most * sizes.ranks / rows_;
}

Parts CpuScorer::layer(const Schedule& s) const {
  const auto h = static_cast<double>(sizes_.hidden), f = static_cast<double>(sizes_.ffn);
  const double tile_m = s.tile_m, tile_n = s.tile_n;
  const double ranks = sizes_.ranks;
  const double row = h * (sizes_.dtype == DType::bf16 ? 2 : 4);
  // Rows rounded up to register blocks, and tiles, over all experts.
  double padded = 0, tiles = 0;
  for (const std::int64_t rows : expert_rows_) {
    const std::int64_t full = rows / s.tile_m, rest = rows % s.tile_m;
    const auto up = [](std::int64_t x) { return (x + kPanel - 1) / kPanel * kPanel; };
    padded += static_cast<double>(full * up(s.tile_m) + up(rest));
    tiles += static_cast<double>(full + (rest > 0 ? 1 : 0));
  }
  const double average = tiles > 0 ? std::max(1.0, rows_ / tiles) : 1;
  // Flops, as long as they would take on tiles of 64 x 128.
  const auto products = [&](double flops, double m, double n) {
    const double rim = 1 / m + 1 / n;
    return flops * (1 - kPackShare + kPackShare * rim / kUnitRim);
  };
  const double passes = backward_ ? 2 : 1;
  double flops = products(4 * padded * h * f, average, std::min(tile_n, f) * 2) +
                 products(2 * padded * h * f, average, std::min(tile_n, h));
  double tasks = tiles * (1 + div_up(f, tile_n) + div_up(h, tile_n));
  if (backward_) {
    flops += products(2 * padded * h * f, average, std::min(tile_n, f)) +
             products(4 * padded * h * f, average, std::min(tile_n, h)) +
             products(6 * rows_ * h * f, std::min(tile_m, h), std::min(tile_n, h));
    tasks += tiles * (1 + div_up(f, tile_n) + div_up(h, tile_n)) +
             static_cast<double>(sizes_.experts) * (div_up(h, tile_m) * div_up(f, tile_n) +
                                                    div_up(2 * f, tile_m) * div_up(h, tile_n));
  }
  // Rows moved between ranks, and copied within one.
  const double tokens = static_cast<double>(sizes_.tokens) * ranks;
  const bool pull = s.direction == Direction::pull;
  const double owners = std::min<double>(ranks, static_cast<double>(sizes_.experts));
  const double reached =
      tokens * owners * (1 - std::pow(1 - 1 / owners, static_cast<double>(sizes_.topk)));
  double moved = s.payload == Payload::rank ? std::min(reached, rows_) : rows_;
  double chunks = div_up(static_cast<double>(sizes_.tokens), s.chunk) * ranks;
  double copied = rows_;  // fan-out
  if (pull) {
    copied += tokens;
    if (s.payload == Payload::choice) moved = 0;  // fanned out from the source
    tasks += passes * chunks * (1 + (s.payload == Payload::rank ? ranks : 0));
  } else {
    tasks += passes * chunks * ranks;
  }
  tasks += passes * chunks;           // reduces
  const double returned = rows_ * 2;  // staged once, added up once
  const double cores = std::min(machine_.cores, ranks * s.workers);
  // The busiest rank has its own workers only.
  const double alone = std::min<double>(machine_.cores, s.workers) * ranks / busiest_;
  const double parallel = std::max(1.0, std::min(cores, alone));
  Parts p;
  p.tensor = flops / machine_.flops_rate / parallel;
  p.link = passes * moved * row / machine_.copy_rate / parallel;
  p.hbm = passes * (copied + returned) * row / machine_.copy_rate / parallel;
  p.latency = tasks * machine_.task_us / parallel;
  // At each end of a phase workers wait for the last task: half a tile of a product on average.
  const double tile_us = 2 * average * std::min(tile_n, h) * std::max(h, f) / machine_.flops_rate;
  const double idle = 1 - 1 / (ranks * s.workers);
  const double phases = s.fusion == Fusion::fused ? 1 : 7;
  p.tail = passes * phases * idle * (0.5 * tile_us + machine_.task_us);
  // Workers that begin with moving leave products to the others, which wait for rows.
  if (s.comm_workers > 0) {
    p.link += 0.5 * (p.link + p.hbm) * s.comm_workers / s.workers;
  }
  return p;
}

}  // namespace uniep::simulate
