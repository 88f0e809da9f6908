// SPDX-License-Identifier: Apache-2.0
#include "layout/heap_layout.hpp"

#include <initializer_list>

#include "base/error.hpp"

namespace uniep {
namespace {

std::int64_t product(std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (const std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) {
      throw_invalid("a region of the symmetric heap would exceed 2^63 bytes; use fewer tokens");
    }
  }
  return result;
}

}  // namespace

HeapLayout::HeapLayout(const HeapShape& s, const Schedule& schedule) {
  const bool pull = schedule.direction == Direction::pull;
  const bool per_choice = schedule.payload == Payload::choice;
  const std::int64_t row = s.hidden * s.element_bytes;
  // Pulled choices go straight from the source's send_rows to the expert-major rows.
  const std::int64_t recv_rows =
      pull && per_choice ? 0 : product({s.num_ranks, s.max_tokens, per_choice ? s.topk : 1});
  const std::int64_t choices = product({s.max_tokens, s.topk});
  const auto set = [this](Region region, std::int64_t bytes) {
    sizes_[static_cast<std::size_t>(region)] = bytes;
  };
  set(Region::header, sizeof(RankHeader));
  set(Region::splits, product({s.num_experts, 8}));
  set(Region::send_order, product({choices, 4}));
  set(Region::topk_ids, product({choices, 4}));
  set(Region::topk_weights, product({choices, 4}));
  set(Region::send_rows, pull ? product({s.max_tokens, row}) : 0);
  set(Region::recv_rows, product({recv_rows, row}));
  set(Region::staging, product({choices, row}));
  set(Region::d_weight_staging, product({choices, 4}));
  set(Region::send_ready, pull ? product({s.max_tokens, 8}) : 0);
  set(Region::row_ready, product({recv_rows, 8}));
  set(Region::return_ready, product({choices, 8}));
  for (std::size_t i = 0; i < kCount; ++i) {
    const std::int64_t padded =
        (sizes_[i] + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
    if (__builtin_add_overflow(offsets_[i], padded, &offsets_[i + 1])) {
      throw_invalid("the symmetric heap of one rank would exceed 2^63 bytes; use fewer tokens");
    }
  }
}

}  // namespace uniep
