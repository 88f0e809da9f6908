// SPDX-License-Identifier: Apache-2.0
// The product of every local expert without tensor cores: f32, never TF32. Each element is one
// chain of fma from +0, k ascending, as on the CPU, so its bits are the CPU's. No speed target.
#include "cuda/formulas.cuh"
#include "cuda/kernels/unroll.hpp"
#include "cuda/launch.hpp"
#include "cuda/split_args.hpp"

namespace uniep::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 64;  // elements of a block's tile, each way
constexpr int kStep = 16;  // of k between two loads
constexpr int kSide = 16;  // threads, each way
constexpr int kPer = kTile / kSide;

// One expert's product: out [m, n] = sum over k of left(m, k) right(k, n), by strides in elements.
struct Product {
  std::int64_t m, n, k;
  std::int64_t stored_m;  // rows beyond m and below this are written with zeros
  std::int64_t left, left_m, left_k;
  std::int64_t right, right_k, right_n;
  std::int64_t out;  // row-major, n a row
};

__device__ Product product_of(const PlainGemmArgs& args, int expert) {
  const std::int64_t start = args.expert_starts[expert];
  const std::int64_t rows = args.expert_rows[expert];
  const std::int64_t padded = args.expert_starts[expert + 1] - start;
  const std::int64_t weights = args.n * args.k * expert;
  switch (args.op) {
    case PlainGemm::fprop:
      return {rows, args.n,  args.k, padded, start * args.k, args.k,
              1,    weights, 1,      args.k, start * args.n};
    case PlainGemm::dgrad:
      return {rows, args.k,  args.n, padded, start * args.n, args.n,
              1,    weights, args.k, 1,      start * args.k};
    case PlainGemm::wgrad:
      break;
  }
  return {args.n, args.k,         rows,   args.n, start * args.n, 1,
          args.n, start * args.k, args.k, 1,      weights};
}

template <typename Storage, typename Out>
__device__ void multiply_tile(const PlainGemmArgs& args, const Product& p, std::int64_t first_m,
                              std::int64_t first_n) {
  __shared__ float left[kStep][kTile + 1];
  __shared__ float right[kStep][kTile + 1];
  const int thread = static_cast<int>(threadIdx.x);
  const int thread_m = thread / kSide;
  const int thread_n = thread % kSide;
  float sums[kPer][kPer] = {};
  for (std::int64_t first_k = 0; first_k < p.k; first_k += kStep) {
    const int steps = static_cast<int>(p.k - first_k < kStep ? p.k - first_k : kStep);
    __syncthreads();  // the step before was read
    for (int i = thread; i < kStep * kTile; i += kThreads) {
      const int k = i / kTile;
      const int j = i % kTile;
      const bool inside = k < steps;
      left[k][j] =
          inside && first_m + j < p.m
              ? widen(static_cast<const Storage*>(
                    args.left)[p.left + (first_m + j) * p.left_m + (first_k + k) * p.left_k])
              : 0.0F;
      right[k][j] =
          inside && first_n + j < p.n
              ? widen(static_cast<const Storage*>(
                    args.right)[p.right + (first_k + k) * p.right_k + (first_n + j) * p.right_n])
              : 0.0F;
    }
    __syncthreads();
    for (int k = 0; k < steps; ++k) {
      UNIEP_UNROLL for (int i = 0; i < kPer; ++i) {
        UNIEP_UNROLL for (int j = 0; j < kPer; ++j) {
          sums[i][j] =
              __fmaf_rn(left[k][thread_m + kSide * i], right[k][thread_n + kSide * j], sums[i][j]);
        }
      }
    }
  }
  UNIEP_UNROLL for (int i = 0; i < kPer; ++i) {
    UNIEP_UNROLL for (int j = 0; j < kPer; ++j) {
      const std::int64_t m = first_m + thread_m + kSide * i;
      const std::int64_t n = first_n + thread_n + kSide * j;
      if (m >= p.stored_m || n >= p.n) continue;
      Out& to = static_cast<Out*>(args.out)[p.out + m * p.n + n];
      const float sum = m < p.m ? sums[i][j] : 0.0F;
      if constexpr (sizeof(Out) == 4) {
        to = args.accumulate ? __fadd_rn(to, sum) : sum;
      } else {
        to = narrow<Out>(sum);
      }
    }
  }
}

template <typename Storage, typename Out>
__global__ void __launch_bounds__(kThreads)
    plain_gemm_kernel(const __grid_constant__ PlainGemmArgs args) {
  if (args.counts->valid == 0) return;
  std::int64_t before = 0;  // tiles of the experts before
  for (int expert = 0; expert < args.experts; ++expert) {
    const Product p = product_of(args, expert);
    if (args.accumulate && p.k == 0) continue;
    const std::int64_t tiles_n = (p.n + kTile - 1) / kTile;
    const std::int64_t tiles = (p.stored_m + kTile - 1) / kTile * tiles_n;
    // This block's first tile of the expert, in turn with all blocks.
    std::int64_t tile = (blockIdx.x + args.blocks - before % args.blocks) % args.blocks;
    for (; tile < tiles; tile += args.blocks) {
      multiply_tile<Storage, Out>(args, p, tile / tiles_n * kTile, tile % tiles_n * kTile);
    }
    before += tiles;
  }
}

}  // namespace

cudaError_t launch_plain_gemm(const PlainGemmArgs& args, cudaStream_t stream) {
  auto* const kernel = args.element_bytes == 4 ? plain_gemm_kernel<float, float>
                       : args.out_bytes == 4   ? plain_gemm_kernel<StoredBf16, float>
                                               : plain_gemm_kernel<StoredBf16, StoredBf16>;
  return launch(kernel, false, args.blocks, kThreads, 0, stream, args);
}

}  // namespace uniep::cuda
