// SPDX-License-Identifier: Apache-2.0
// What the simulator knows of a GPU and its links: a file of named figures, each with where it is
// from. Times in microseconds, rates in bytes per microsecond (1000 of these are 1 GB/s).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace uniep::simulate {

inline constexpr int kHardwareVersion = 1;  // of the file

// Bytes per microsecond by number of moving warps: points in ascending order, straight between
// them, from 0 at 0 warps; the last one holds for all above.
class RateCurve {
 public:
  RateCurve() = default;
  explicit RateCurve(std::vector<std::pair<double, double>> points) : points_(std::move(points)) {}
  [[nodiscard]] double at(double warps) const;
  [[nodiscard]] const std::vector<std::pair<double, double>>& points() const { return points_; }

 private:
  std::vector<std::pair<double, double>> points_;
};

struct Hardware {
  std::string name;

  double sms = 0;
  double shared_bytes = 0;   // of a block
  double gpus_per_node = 0;  // that the scale-up link joins

  // Products: tiles of 128 x 256, taken from a counter.
  double mma_step_us = 0;         // 64 of k of a full tile on one SM, at the clock that lasts
  double narrow_share = 0;        // 0 to 1: of it, what a tile of fewer than 256 rows costs anyway
  double epilogue_rows_us = 0;    // of a full tile, bf16 rows
  double epilogue_swiglu_us = 0;  // with the activation, and h beside it
  double epilogue_wgrad_us = 0;   // bf16 weight gradients
  double epilogue_f32_us = 0;     // f32, rows or weight gradients
  double epilogue_main_us = 0;    // f32 weight gradients added to what is there
  double tail_share = 0;          // 0 to 1: of the last wave's empty part, how much is lost

  double hbm_rate = 0;
  double launch_us = 0;       // from a kernel's end to the next one's first work
  double grid_launch_us = 0;  // the same where all blocks of a launch must be resident
  double signal_us = 0;       // from a signal raised to its waiter gone on, between GPUs

  // Moving rows, a warp each. Of memory on the same GPU:
  double warp_read_rate = 0;
  double warp_store_rate = 0;
  double warp_reduce_rate = 0;  // rows added up
  double chunk_us = 0;          // of a warp for each chunk: places, fence and signals
  // Plan of a rank: base + pairs x (tokens x topk) / blocks.
  double plan_base_us = 0;
  double plan_pair_us = 0;

  RateCurve link_push;  // to another GPU of the node, per direction
  RateCurve link_pull;
  double link_short_share = 0;  // of link_push where tiles are stored in pieces of 128 bytes
  double scale_out_rate = 0;    // to other nodes, of a GPU and per direction
  double scale_out_us = 0;      // a signal to another node

  std::map<std::string, std::string> sources;  // of each figure
};

// Of `text`, a JSON object {"uniep_hardware": 1, "name": …, "figures": {NAME: {"value": number or
// [[warps, rate], …], "source": "measured: …" | "vendor: …" | "estimate: …"}}}. Every figure must
// be there once, and no other. Errors: invalid_argument, one sentence that names `origin`, the
// figure, the value and what would be valid.
[[nodiscard]] Hardware parse_hardware(std::string_view text, const std::string& origin);
[[nodiscard]] Hardware load_hardware(const std::string& path);

// For tests and fits: a scalar figure by its name, as in the file. Errors: invalid_argument.
[[nodiscard]] double& figure(Hardware& hardware, std::string_view name);
[[nodiscard]] std::vector<std::string> figure_names();  // those of one value

}  // namespace uniep::simulate
