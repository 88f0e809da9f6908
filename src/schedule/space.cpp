// SPDX-License-Identifier: Apache-2.0
#include "schedule/space.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include "base/error.hpp"

namespace uniep {
namespace {

// Of the kernels as they are: src/cuda/grouped_gemm_args.hpp, split_args.hpp, fused_args.hpp.
constexpr int kGemmTileRows = 256;
constexpr int kGemmTileColumns = 128;
constexpr std::int64_t kGemmSharedBytes = 4 * 48 * 1024 + 4 * 8192 + 3072;
constexpr int kMaxVirtualRanks = 16;
constexpr int kMaxFusedRanks = 8;
constexpr int kFusedWarps = 12;
constexpr std::int64_t kMostFusedCounts = std::int64_t{1} << 20;
constexpr std::int64_t kRowAlignment = 64;

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// a * b, or the largest value where that is more.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

template <typename Check>
std::optional<std::string> sentence_of(Check check) {
  try {
    check();
    return std::nullopt;
  } catch (const Error& error) {
    return error.what();
  }
}

void check_common(const LayerSizes& sizes) {
  if (sizes.dtype != DType::bf16 && sizes.dtype != DType::f32) {
    throw_invalid("the layer computes on bf16 and f32; another dtype was given");
  }
}

void check_cpu(const Schedule& s, const LayerSizes& sizes) {
  check_common(sizes);
  validate(s);
  // A task is named by two 32-bit numbers.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t hidden_tiles = div_up(sizes.hidden, s.tile_m);
  const std::int64_t wgrads =
      std::max(times(hidden_tiles, div_up(sizes.ffn, s.tile_n)),
               times(div_up(2 * sizes.ffn, s.tile_m), div_up(sizes.hidden, s.tile_n)));
  if (wgrads > kMost) {
    throw_invalid(
        "schedule tile_m = {} and tile_n = {} cut a weight gradient of hidden {} and ffn {} in {} "
        "tiles; at most {} are valid, so take larger tiles",
        s.tile_m, s.tile_n, sizes.hidden, sizes.ffn, wgrads, kMost);
  }
  const std::int64_t rows = times(times(sizes.tokens, sizes.topk), sizes.ranks);
  const std::int64_t row_tiles =
      rows / s.tile_m + std::min<std::int64_t>(rows, div_up(sizes.experts, sizes.ranks));
  if (row_tiles > kMost) {
    throw_invalid("schedule tile_m is {}; {} rows make {} tiles, and at most {} are valid",
                  s.tile_m, rows, row_tiles, kMost);
  }
}

void check_gpu_sizes(const LayerSizes& sizes, const GpuLimits& limits) {
  check_common(sizes);
  if (limits.ranks_per_gpu < 1 || limits.ranks_per_gpu > kMaxVirtualRanks) {
    throw_invalid("{} ranks share a GPU; 1 to {} are valid", limits.ranks_per_gpu,
                  kMaxVirtualRanks);
  }
  if (sizes.dtype != DType::bf16) return;
  // Tensor copies and the k16 steps of tensor cores take whole units of 16 bytes.
  for (const auto& [name, value] :
       {std::pair{"hidden", sizes.hidden}, std::pair{"ffn", sizes.ffn}}) {
    if (value % 8 != 0) {
      throw_invalid("{} is {}; on tensor cores it must be a multiple of 8", name, value);
    }
  }
  if (limits.shared_bytes < kGemmSharedBytes) {
    throw_invalid(
        "this GPU lends a block {} bytes of shared memory; the products' ring of four stages "
        "needs {}",
        limits.shared_bytes, kGemmSharedBytes);
  }
}

void check_fused(const CudaSchedule& s, const LayerSizes& sizes, const GpuLimits& limits,
                 int blocks) {
  if (sizes.dtype != DType::bf16) {
    throw_invalid("fusion=fused needs bf16 on tensor cores; f32 takes fusion=split");
  }
  if (limits.ranks_per_gpu > kMaxFusedRanks) {
    throw_invalid("{} ranks share a GPU; fusion=fused takes 1 to {} in a launch",
                  limits.ranks_per_gpu, kMaxFusedRanks);
  }
  // Loaders wait for rows, so whoever moves them must be running first: movers are the first blocks
  // of a rank, and have to have SMs of their own.
  const int product_sms = s.sms == 0 ? limits.sms : std::min(s.sms, limits.sms);
  const int blocks_of_rank = product_sms / 2 / limits.ranks_per_gpu * 2;
  const int movers = (blocks + 1) / 2 * 2;
  if (movers > blocks_of_rank) {
    throw_invalid(
        "schedule blocks is {}: fusion=fused starts {} blocks of a rank on {} SMs for {} ranks, "
        "and all that move rows must be among them, or products wait for rows that nobody sends; "
        "0 to {} are valid",
        blocks, blocks_of_rank, product_sms, limits.ranks_per_gpu, blocks_of_rank);
  }
  // A count and an epoch share a word.
  const std::int64_t pairs = times(sizes.tokens, sizes.topk);
  const std::int64_t chunks = times(div_up(pairs, s.chunk), sizes.ranks);
  const std::int64_t warps = (std::int64_t{blocks} + 1) * kFusedWarps;
  if (chunks + warps >= kMostFusedCounts) {
    throw_invalid(
        "schedule chunk is {}: {} chunks of a fused forward are too many, fewer than {} are valid; "
        "take larger ones",
        s.chunk, chunks, kMostFusedCounts - warps);
  }
  const std::int64_t local = div_up(sizes.experts, sizes.ranks);
  const std::int64_t rows = times(pairs, sizes.ranks) + local * (kRowAlignment - 1);
  const std::int64_t tiles =
      times(rows / kGemmTileRows + sizes.experts, sizes.hidden / kGemmTileColumns + 2);
  if (tiles >= kMostFusedCounts / 2) {
    throw_invalid("up to {} tiles in a fused forward; fewer than {} are valid, or fusion=split",
                  tiles, kMostFusedCounts / 2);
  }
}

void check_cuda(const CudaSchedule& s, const LayerSizes& sizes, const GpuLimits& limits) {
  check_gpu_sizes(sizes, limits);
  validate(s);
  const int blocks = s.blocks == 0 ? default_blocks(limits) : s.blocks;
  // Blocks that move rows wait for those of other ranks: all of a launch must run at once, and an
  // SM holds one of them.
  if (blocks * limits.ranks_per_gpu > limits.sms) {
    throw_invalid(
        "schedule blocks is {}: {} ranks need {} blocks resident at once, and this GPU holds {}; 1 "
        "to {} are valid",
        blocks, limits.ranks_per_gpu, blocks * limits.ranks_per_gpu, limits.sms,
        limits.sms / limits.ranks_per_gpu);
  }
  if (s.sms > limits.sms) {
    throw_invalid("schedule sms is {}; this GPU has {}, or 0 for all", s.sms, limits.sms);
  }
  if (s.fusion == Fusion::fused) check_fused(s, sizes, limits, blocks);
}

constexpr std::array<std::int32_t, 9> kChunks{1, 2, 4, 8, 16, 32, 64, 128, 256};

// Chunks up to the first that holds all tokens: larger ones do the same.
std::vector<std::int32_t> chunks_for(std::int64_t pieces) {
  std::vector<std::int32_t> chunks;
  for (const std::int32_t chunk : kChunks) {
    chunks.push_back(chunk);
    if (chunk >= pieces) break;
  }
  return chunks;
}

}  // namespace

int default_blocks(const GpuLimits& limits) {
  return std::clamp(limits.sms / std::max(1, limits.ranks_per_gpu), 1, 16);
}

std::optional<std::string> why_illegal(const Schedule& schedule, const LayerSizes& sizes) {
  return sentence_of([&] { check_cpu(schedule, sizes); });
}

std::optional<std::string> why_illegal(const CudaSchedule& schedule, const LayerSizes& sizes,
                                       const GpuLimits& limits) {
  return sentence_of([&] { check_cuda(schedule, sizes, limits); });
}

std::vector<Schedule> legal_schedules(const LayerSizes& sizes, const Schedule& base) {
  constexpr std::array<std::int32_t, 5> kTileM{32, 64, 96, 128, 192};
  constexpr std::array<std::int32_t, 4> kTileN{64, 128, 192, 256};
  constexpr std::array<std::int32_t, 4> kCpuChunks{4, 16, 64, 256};
  const bool alone = sizes.ranks == 1;
  std::vector<std::int32_t> comm{0};
  for (std::int32_t workers = 1; workers < base.workers; workers *= 2) comm.push_back(workers);
  std::vector<Schedule> all;
  const auto keep = [&](const Schedule& s) {
    if (!why_illegal(s, sizes)) all.push_back(s);
  };
  for (const Fusion fusion : {Fusion::fused, Fusion::split}) {
    for (const Payload payload : {Payload::rank, Payload::choice}) {
      for (const Direction direction : {Direction::push, Direction::pull}) {
        for (const std::int32_t tile_m : kTileM) {
          for (const std::int32_t tile_n : kTileN) {
            for (const std::int32_t chunk : kCpuChunks) {
              for (const std::int32_t comm_workers : comm) {
                for (const auto order : {DestinationOrder::rotated, DestinationOrder::ascending}) {
                  for (const auto wgrad : {WgradOrder::filling, WgradOrder::after}) {
                    // What a split schedule does not look at, and what one rank does not have.
                    if (fusion == Fusion::split &&
                        (comm_workers > 0 || wgrad == WgradOrder::after)) {
                      continue;
                    }
                    if (alone && order == DestinationOrder::ascending) continue;
                    Schedule s = base;
                    s.fusion = fusion;
                    s.payload = payload;
                    s.direction = direction;
                    s.tile_m = tile_m;
                    s.tile_n = tile_n;
                    s.chunk = chunk;
                    s.comm_workers = comm_workers;
                    s.destination_order = order;
                    s.wgrad = wgrad;
                    keep(s);
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  return all;
}

std::vector<CudaSchedule> legal_cuda_schedules(const LayerSizes& sizes, const GpuLimits& limits,
                                               const CudaSchedule& base) {
  const bool alone = sizes.ranks == 1;
  std::vector<CudaSchedule> all;
  for (const Fusion fusion : {Fusion::split, Fusion::fused}) {
    const std::int64_t pieces =
        fusion == Fusion::fused ? times(sizes.tokens, sizes.topk) : sizes.tokens;
    const std::vector<std::int32_t> chunks = chunks_for(pieces);
    const int most_warps = fusion == Fusion::fused ? kFusedWarps - 1 : 15;
    for (const Payload payload : {Payload::rank, Payload::choice}) {
      for (const Direction dispatch : {Direction::push, Direction::pull}) {
        for (const Direction combine : {Direction::push, Direction::pull}) {
          const bool pulls = dispatch == Direction::pull || combine == Direction::pull;
          if (fusion == Fusion::fused && pulls) continue;
          // One rank moves nothing, whatever the way.
          if (alone && (pulls || payload == Payload::choice)) continue;
          for (std::int32_t blocks = 1; blocks <= 32; ++blocks) {
            CudaSchedule s = base;
            s.fusion = fusion;
            s.payload = payload;
            s.dispatch = dispatch;
            s.combine = combine;
            s.blocks = blocks;
            for (s.push_warps = 1; s.push_warps <= most_warps; ++s.push_warps) {
              for (const std::int32_t chunk : chunks) {
                s.chunk = chunk;
                if (!why_illegal(s, sizes, limits)) all.push_back(s);
              }
            }
          }
        }
      }
    }
  }
  return all;
}

}  // namespace uniep
