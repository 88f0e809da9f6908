// SPDX-License-Identifier: Apache-2.0
// The closed form of a layer on the CPU: the same parts, from a few figures of the machine.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "schedule/space.hpp"
#include "simulate/score.hpp"

namespace uniep::simulate {

struct CpuMachine {
  double cores = 1;
  double flops_rate = 1;  // of a core, flops in a microsecond, on tiles of 64 x 128
  double copy_rate = 1;   // bytes in a microsecond of a core that copies rows
  double task_us = 2;     // of a worker for each task: a ticket, looks at signals, a record
};

// Rows of all experts, [experts], and of the ranks that own them; backward too, if asked for.
class CpuScorer {
 public:
  CpuScorer(const CpuMachine& machine, const LayerSizes& sizes,
            std::span<const std::int64_t> expert_rows, bool backward);
  [[nodiscard]] Parts layer(const Schedule& schedule) const;

 private:
  CpuMachine machine_;
  LayerSizes sizes_;
  std::vector<std::int64_t> expert_rows_;
  bool backward_;
  double rows_ = 0;
  double busiest_ = 1;  // rows of the busiest rank over those of the average one
};

}  // namespace uniep::simulate
