// SPDX-License-Identifier: Apache-2.0
// The two roles of combine, a warp each: returning results to the ranks their tokens came from, and
// adding up a token's choices in ascending order.
#pragma once

#include "cuda/formulas.cuh"
#include "cuda/roles/move_rows.cuh"

namespace uniep::cuda {

// `Count` elements that are loaded at once: of 16 bytes, or one.
template <typename Storage, int Count>
struct Elements {
  static_assert(Count == 1);
  Storage raw;
  [[nodiscard]] static __device__ Elements load(const std::byte* row, int unit) {
    if constexpr (sizeof(Storage) == 2) {
      return {{__ldcg(reinterpret_cast<const std::uint16_t*>(row) + unit)}};
    } else {
      return {__ldcg(reinterpret_cast<const float*>(row) + unit)};
    }
  }
  __device__ void add_to(float (&sums)[Count]) const { sums[0] = __fadd_rn(sums[0], widen(raw)); }
  static __device__ void store(std::byte* row, int unit, const float (&sums)[Count]) {
    reinterpret_cast<Storage*>(row)[unit] = narrow<Storage>(sums[0]);
  }
};

template <>
struct Elements<StoredBf16, 8> {
  uint4 raw;
  [[nodiscard]] static __device__ Elements load(const std::byte* row, int unit) {
    return {__ldcg(reinterpret_cast<const uint4*>(row) + unit)};
  }
  __device__ void add_to(float (&sums)[8]) const {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      sums[2 * i] = __fadd_rn(sums[2 * i], first_of(words[i]));
      sums[2 * i + 1] = __fadd_rn(sums[2 * i + 1], second_of(words[i]));
    }
  }
  static __device__ void store(std::byte* row, int unit, const float (&sums)[8]) {
    reinterpret_cast<uint4*>(row)[unit] = {pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]),
                                           pack_bf16(sums[4], sums[5]),
                                           pack_bf16(sums[6], sums[7])};
  }
};

template <>
struct Elements<float, 4> {
  uint4 raw;
  [[nodiscard]] static __device__ Elements load(const std::byte* row, int unit) {
    return {__ldcg(reinterpret_cast<const uint4*>(row) + unit)};
  }
  __device__ void add_to(float (&sums)[4]) const {
    const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    UNIEP_UNROLL for (int i = 0; i < 4; ++i) {
      sums[i] = __fadd_rn(sums[i], __uint_as_float(words[i]));
    }
  }
  static __device__ void store(std::byte* row, int unit, const float (&sums)[4]) {
    reinterpret_cast<uint4*>(row)[unit] = {__float_as_uint(sums[0]), __float_as_uint(sums[1]),
                                           __float_as_uint(sums[2]), __float_as_uint(sums[3])};
  }
};

// Copies the rows of this warp's share to the staging places of their tokens.
template <typename Unit>
__device__ void return_rows(const Mover& m, const CombineRank& mine) {
  const MoveShape& shape = m.shape;
  const std::int64_t rows = mine.plan.expert_starts[mine.experts];
  for (std::int64_t row = m.warp_of_rank(); row < rows; row += m.warps_of_rank()) {
    const RowSource source = mine.plan.row_sources[row];
    if (source.rank < 0 || source.rank == m.rank) continue;  // those of this rank are read in place
    std::byte* const to = m.region<std::byte>(source.rank, shape.regions.staging) +
                          std::int64_t{source.place} * shape.row_bytes;
    copy_row<Unit>(mine.y_rows + row * shape.row_bytes, shape.row_bytes,
                   {m.lane == 0 ? to : nullptr, nullptr}, m.lane);
    if (m.lane == 0 && mine.d_weight_rows != nullptr) {
      m.region<float>(source.rank, shape.regions.d_weight_staging)[source.place] =
          mine.d_weight_rows[row];
    }
  }
}

// Where the result of a choice is to be read once it is there; null for a masked one.
struct ResultPlace {
  const std::byte* row;
  const float* d_weight;
};
[[nodiscard]] __device__ __forceinline__ ResultPlace result_place(const Mover& m,
                                                                  const CombineRank& mine,
                                                                  std::int64_t token, int choice) {
  const MoveShape& shape = m.shape;
  if (choice >= shape.topk) return {nullptr, nullptr};
  const std::int64_t place = token * shape.topk + choice;
  const int owner = mine.plan.owners[place];
  if (owner == kNoOwner) return {nullptr, nullptr};
  const std::int64_t slot = mine.plan.slots[place];
  if (owner == m.rank) {
    return {mine.y_rows + slot * shape.row_bytes,
            mine.d_weight_rows != nullptr ? mine.d_weight_rows + slot : nullptr};
  }
  if (shape.pull_combine) {
    return {m.region<const std::byte>(owner, shape.regions.y_rows) + slot * shape.row_bytes,
            m.region<const float>(owner, shape.regions.d_weight_rows) + slot};
  }
  return {m.region<const std::byte>(m.rank, shape.regions.staging) + place * shape.row_bytes,
          m.region<const float>(m.rank, shape.regions.d_weight_staging) + place};
}

template <typename Storage, int Count>
__device__ void reduce_token(const Mover& m, const CombineRank& mine, std::int64_t token) {
  constexpr int kInFlight = 8;
  using Load = Elements<Storage, Count>;
  const MoveShape& shape = m.shape;
  const ResultPlace low = result_place(m, mine, token, m.lane);
  const ResultPlace high = result_place(m, mine, token, m.lane + 32);
  if (mine.d_topk_weights != nullptr) {
    float* const to = mine.d_topk_weights + token * shape.topk;
    if (m.lane < shape.topk) to[m.lane] = low.row != nullptr ? __ldcg(low.d_weight) : 0.0F;
    if (m.lane + 32 < shape.topk) {
      to[m.lane + 32] = high.row != nullptr ? __ldcg(high.d_weight) : 0.0F;
    }
  }
  const int units = static_cast<int>(shape.row_bytes / static_cast<std::int64_t>(sizeof(Load)));
  const std::uint64_t choices = std::uint64_t{__ballot_sync(kWholeWarp, high.row != nullptr)}
                                    << 32 |
                                __ballot_sync(kWholeWarp, low.row != nullptr);
  for (int unit = m.lane; unit - m.lane < units; unit += 32) {
    float sums[Count] = {};
    for (std::uint64_t left = choices; left != 0;) {
      Load loads[kInFlight];
      bool is_there[kInFlight];
      UNIEP_UNROLL for (int i = 0; i < kInFlight; ++i) {
        is_there[i] = left != 0;
        if (!is_there[i]) continue;
        const int choice = __ffsll(static_cast<long long>(left)) - 1;
        left &= left - 1;
        const std::byte* const row = shuffle(choice < 32 ? low.row : high.row, choice % 32);
        if (unit < units) loads[i] = Load::load(row, unit);
      }
      UNIEP_UNROLL for (int i = 0; i < kInFlight; ++i) {
        if (is_there[i]) loads[i].add_to(sums);
      }
    }
    if (unit < units) Load::store(mine.out + token * shape.row_bytes, unit, sums);
  }
}

}  // namespace uniep::cuda
