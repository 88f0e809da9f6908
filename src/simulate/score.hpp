// SPDX-License-Identifier: Apache-2.0
// The time of a layer in closed form, in parts that add up to it: which resource each microsecond
// is spent on. Prepared once for a GPU and a load, then under a microsecond a schedule.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "simulate/hardware.hpp"
#include "simulate/load.hpp"

namespace uniep::simulate {

// Microseconds, each counted once, where it is what holds up the rest.
struct Parts {
  double tensor = 0;   // products
  double link = 0;     // rows between GPUs
  double hbm = 0;      // memory of the GPU, or the warps that move rows in it
  double tail = 0;     // SMs that have run out of tiles while others work
  double latency = 0;  // launches, signals, the plan

  [[nodiscard]] double total() const { return tensor + link + hbm + tail + latency; }
  Parts& operator+=(const Parts& other);
  friend Parts operator+(Parts a, const Parts& b) { return a += b; }
};
// "tensor", "link", "hbm", "tail" or "latency": the largest.
[[nodiscard]] std::string_view limit_of(const Parts& parts);
inline constexpr std::array<std::pair<const char*, double Parts::*>, 5> kParts{
    {{"tensor", &Parts::tensor},
     {"link", &Parts::link},
     {"hbm", &Parts::hbm},
     {"tail", &Parts::tail},
     {"latency", &Parts::latency}}};

struct StageTime {
  const char* name;
  Parts parts;
};

enum class Gemm { gemm1, gemm2, dgrad2, dgrad1, wgrad2, wgrad1 };

// What a grouped product writes. Rows: [rows, columns], each a chain over `inner`. A weight
// gradient: [columns, inner] of each expert, each a chain over the expert's rows.
enum class Output { rows, swiglu, rows_f32, wgrad, wgrad_f32, main_grad };

struct GemmWork {
  double tile_us = 0;   // of a full tile, which is the last wave's quantum
  double total_us = 0;  // of all tiles, on one SM
  double hbm_us = 0;
};
[[nodiscard]] GemmWork gemm_work(const Hardware& hardware, const Groups& groups, Output output,
                                 std::int64_t columns, std::int64_t inner);
// On `sms` SMs, without its launch; each SM does something else for `moving_us` besides.
[[nodiscard]] Parts gemm_time(const Hardware& hardware, const GemmWork& work, double sms,
                              double moving_us = 0);

class Scorer {
 public:
  // Errors: as uniform_load; invalid_argument where the dtype is not bf16, for which there are no
  // figures.
  Scorer(const Hardware& hardware, const Load& load);

  // Of a legal schedule. Stages, if asked for, are appended in their order.
  [[nodiscard]] Parts forward(const CudaSchedule& schedule,
                              std::vector<StageTime>* stages = nullptr) const;
  [[nodiscard]] Parts backward(const CudaSchedule& schedule,
                               std::vector<StageTime>* stages = nullptr) const;
  [[nodiscard]] Parts layer(const CudaSchedule& s) const { return forward(s) + backward(s); }

  // One product alone on `sms` SMs (0: all), without its launch.
  [[nodiscard]] Parts product(Gemm gemm, int sms = 0) const;
  [[nodiscard]] GpuLimits limits() const;
  [[nodiscard]] const Load& load() const { return load_; }

 private:
  struct Moves;
  [[nodiscard]] double sms_of(const CudaSchedule& schedule) const;
  [[nodiscard]] int blocks_of(const CudaSchedule& schedule) const;
  [[nodiscard]] Parts plan(int blocks) const;
  [[nodiscard]] Moves moves(const CudaSchedule& schedule, double pushers, double relays) const;
  [[nodiscard]] Parts dispatch(const CudaSchedule& schedule) const;
  [[nodiscard]] Parts combine(const CudaSchedule& schedule) const;
  [[nodiscard]] Parts fused_dispatch(const CudaSchedule& schedule, const GemmWork& work) const;
  [[nodiscard]] Parts fused_combine(const CudaSchedule& schedule, const GemmWork& work) const;
  [[nodiscard]] Parts split_products(const CudaSchedule& schedule, Gemm gemm) const;

  Hardware hw_;
  Load load_;
  double row_bytes_ = 0;
  double on_gpu_ = 1;  // ranks that share the GPU
  std::array<GemmWork, 6> work_{};
  double activation_gradient_us_ = 0;
};

}  // namespace uniep::simulate
