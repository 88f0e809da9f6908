// SPDX-License-Identifier: Apache-2.0
// Decides on the hardware what the bits of a WGMMA product depend on. One 64-row product is
// computed in a base form (n = 256, both operands K-major, accumulator set to +0) and in every
// variant; an element's bits are compared wherever both forms have it. Prints, for each kind of
// data, how many elements differ; exits 1 if any do.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/ptx/mbarrier.hpp"
#include "cuda/ptx/tma.hpp"
#include "cuda/ptx/wgmma.hpp"
#include "cuda_test.cuh"

namespace {

using namespace uniep::cuda;
using namespace uniep::cuda_test;
using ptx::Major;

constexpr int kMaxK = 256;
constexpr int kMaxN = 256;
constexpr int kRowsA = 64;
constexpr int kDataK = 64;  // of the shallow data
constexpr int kSharedBytes = (kRowsA + kMaxN) * kMaxK * 2;

// Element (mn, k) of an operand [rows, k] inside its boxes.
template <Major kMajor>
__device__ int box_offset(int mn, int k, int rows) {
  const int row = kMajor == Major::k ? mn : k % 64;
  const int column = kMajor == Major::k ? k % 64 : mn % 64;
  const int box = kMajor == Major::k ? 0 : mn / 64;
  const int swizzled = row * 128 + (((column / 8) ^ (row & 7)) << 4) + column % 8 * 2;
  return k / 64 * rows * 128 + box * ptx::kBoxBytes + swizzled;
}

template <Major kMajor>
__device__ void fill_operand(std::uint8_t* shared, const bf16* data, int rows, int k_extent) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * k_extent; i += 128) {
    const int mn = i / k_extent, k = i % k_extent;
    *reinterpret_cast<bf16*>(shared + box_offset<kMajor>(mn, k, rows)) = data[mn * kMaxK + k];
  }
}

template <int kN, Major kA, Major kB, bool kStart>
__device__ __forceinline__ void product_step(float (&acc)[128], const std::uint8_t* shared,
                                             int step) {
  const int k_tile = step / 4, inner = step % 4;
  const std::uint32_t a = ptx::shared_address(shared) + k_tile * kRowsA * 128;
  const std::uint32_t b = ptx::shared_address(shared) + kRowsA * kMaxK * 2 + k_tile * kN * 128;
  const std::uint64_t desc_a = ptx::wgmma_descriptor(a) + inner * ptx::kDescriptorStep<kA>;
  const std::uint64_t desc_b = ptx::wgmma_descriptor(b) + inner * ptx::kDescriptorStep<kB>;
  if constexpr (kStart) {
    ptx::Wgmma<kN, kA, kB>::start(acc, desc_a, desc_b);
  } else {
    ptx::Wgmma<kN, kA, kB>::mma(acc, desc_a, desc_b);
  }
}

// d [64, kN] = a [64, k] b [kN, k]^T; a and b have rows of kMaxK elements. kSteps k16 steps are in
// flight at once, which is what a kernel's tile_k decides.
template <int kN, Major kA, Major kB, int kSteps, bool kStart>
__global__ void product_kernel(float* d, const bf16* a, const bf16* b, int k_extent) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  fill_operand<kA>(shared, a, kRowsA, k_extent);
  fill_operand<kB>(shared + kRowsA * kMaxK * 2, b, kN, k_extent);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  float acc[128];
  for (float& value : acc) value = 0.0F;
  int step = 0;
  if constexpr (kStart) {
    ptx::wgmma_fence();
    product_step<kN, kA, kB, true>(acc, shared, step++);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin<kN / 2>(acc);
  }
  UNIEP_NO_UNROLL while (step < k_extent / 16) {
    ptx::wgmma_fence();
    UNIEP_UNROLL for (int i = 0; i < kSteps; ++i) {
      product_step<kN, kA, kB, false>(acc, shared, step + i);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin<kN / 2>(acc);
    step += kSteps;
  }
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  UNIEP_UNROLL for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i % 4 / 2);
    d[row * kMaxN + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = acc[i];
  }
}

using Matrix = std::vector<float>;  // [rows, kMaxK] or a product [64, kMaxN]

template <int kN, Major kA = Major::k, Major kB = Major::k, int kSteps = 4, bool kStart = false>
Matrix product(const Matrix& a, const Matrix& b, int k_extent) {
  const auto narrow = [](const Matrix& from) {
    std::vector<bf16> to(from.size());
    for (std::size_t i = 0; i < from.size(); ++i) to[i] = __float2bfloat16_rn(from[i]);
    return to;
  };
  const Buffer<bf16> device_a(narrow(a)), device_b(narrow(b));
  const Buffer<float> d(kRowsA * kMaxN);
  d.poison();
  const auto kernel = product_kernel<kN, kA, kB, kSteps, kStart>;
  UNIEP_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  kernel<<<1, 128, kSharedBytes>>>(d.get(), device_a.get(), device_b.get(), k_extent);
  UNIEP_CUDA_CHECK(cudaGetLastError());
  return d.download();
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Host random numbers: SplitMix64.
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9E3779B97F4A7C15U);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}
float next_normal(std::uint64_t& state) {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += static_cast<double>(next_random(state) >> 11) * 0x1p-53;
  return static_cast<float>(sum);
}

const char* const kKinds[] = {"normal",       "wide exponents", "subnormal",
                              "signed zeros", "cancelling",     "huge"};
constexpr int kNumKinds = 6;

// One value of a kind; `k` lets cancelling data pair each value with its opposite.
float draw(int kind, int k, float previous, std::uint64_t& state) {
  const float normal = next_normal(state);
  switch (kind) {
    case 0:
      return normal;
    case 1:
      return std::ldexp(normal, static_cast<int>(next_random(state) % 81) - 40);
    case 2:
      return std::ldexp(normal, -126 - static_cast<int>(next_random(state) % 6));
    case 3: {
      const std::uint64_t pick = next_random(state) % 4;
      return pick == 0 ? -0.0F : pick == 1 ? 0.0F : pick == 2 ? normal : -normal;
    }
    case 4:
      return k % 2 == 0 ? normal : -previous * (next_random(state) % 4 == 0 ? 1.0078125F : 1.0F);
    default:
      return std::ldexp(normal, 60 + static_cast<int>(next_random(state) % 8));
  }
}

struct Data {
  Matrix a, b;
};

Data make_data(int kind, int num_k, std::uint64_t seed) {
  Data data{Matrix(kRowsA * kMaxK, 0.0F), Matrix(kMaxN * kMaxK, 0.0F)};
  std::uint64_t state = seed * 1000 + static_cast<std::uint64_t>(kind);
  const auto fill = [&](Matrix& matrix, int rows, int operand_kind) {
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < num_k; ++k) {
        const float previous = k > 0 ? matrix[static_cast<std::size_t>(r * kMaxK + k - 1)] : 0.0F;
        matrix[static_cast<std::size_t>(r * kMaxK + k)] = draw(operand_kind, k, previous, state);
      }
    }
  };
  fill(data.a, kRowsA, kind);
  // Opposite values cancel where b repeats its value; subnormal times normal stays in range.
  fill(data.b, kMaxN, kind == 2 ? 0 : kind);
  if (kind == 4) {
    for (int r = 0; r < kMaxN; ++r) {
      for (int k = 1; k < num_k; k += 2) {
        data.b[static_cast<std::size_t>(r * kMaxK + k)] =
            data.b[static_cast<std::size_t>(r * kMaxK + k - 1)];
      }
    }
  }
  return data;
}

struct Tally {
  std::uint64_t compared[kNumKinds] = {};
  std::uint64_t differ[kNumKinds] = {};
};

// Compares element (map_row(i), map_column(j)) of `other` with (i, j) of `base`.
template <typename MapTo>
void compare(Tally& tally, int kind, const Matrix& base, const Matrix& other, int rows, int columns,
             MapTo&& map_to) {
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      const float x = base[static_cast<std::size_t>(i * kMaxN + j)];
      const float y = other[static_cast<std::size_t>(map_to(i, j))];
      tally.compared[kind]++;
      tally.differ[kind] += bits_of(x) != bits_of(y);
    }
  }
}

constexpr auto kSame = [](int i, int j) { return i * kMaxN + j; };

template <int kN>
void compare_width(Tally& tally, int kind, const Data& data, const Matrix& base) {
  const Matrix other = product<kN>(data.a, data.b, kDataK);
  compare(tally, kind, base, other, kRowsA, kN, kSame);
}

template <int kN>
void compare_majors(Tally& tally, int kind, const Data& data, const Matrix& base) {
  compare(tally, kind, base, product<kN, Major::mn, Major::k>(data.a, data.b, kDataK), kRowsA, kN,
          kSame);
  compare(tally, kind, base, product<kN, Major::k, Major::mn>(data.a, data.b, kDataK), kRowsA, kN,
          kSame);
  compare(tally, kind, base, product<kN, Major::mn, Major::mn>(data.a, data.b, kDataK), kRowsA, kN,
          kSame);
}

Matrix rotate_rows(const Matrix& from, int rows, int by) {
  Matrix to(from.size());
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < kMaxK; ++k) {
      to[static_cast<std::size_t>((r + by) % rows * kMaxK + k)] =
          from[static_cast<std::size_t>(r * kMaxK + k)];
    }
  }
  return to;
}

enum Variant {
  width,
  majors,
  tile_k,
  zero_steps,
  exchange,
  position_m,
  position_n,
  neighbours,
  overwrite,
  kNumVariants
};
const char* const kVariants[] = {"n = 32 ... 224",
                                 "operands MN-major",
                                 "tile_k 16, 32, 128, 256",
                                 "64 to 192 trailing zeros of k",
                                 "operands exchanged",
                                 "another row of m",
                                 "another column of n",
                                 "neighbours inf and NaN",
                                 "first step overwrites instead of adding to +0"};

void probe(Tally (&tallies)[kNumVariants], int kind, std::uint64_t seed) {
  const Data data = make_data(kind, kDataK, seed);
  const Data deep = make_data(kind, kMaxK, seed + 500);
  const Matrix base = product<256>(data.a, data.b, kDataK);
  compare_width<32>(tallies[width], kind, data, base);
  compare_width<64>(tallies[width], kind, data, base);
  compare_width<96>(tallies[width], kind, data, base);
  compare_width<128>(tallies[width], kind, data, base);
  compare_width<160>(tallies[width], kind, data, base);
  compare_width<192>(tallies[width], kind, data, base);
  compare_width<224>(tallies[width], kind, data, base);
  compare_majors<64>(tallies[majors], kind, data, base);
  compare_majors<256>(tallies[majors], kind, data, base);

  const Matrix deep_base = product<256>(deep.a, deep.b, kMaxK);
  compare(tallies[tile_k], kind, deep_base,
          product<256, Major::k, Major::k, 1>(deep.a, deep.b, kMaxK), kRowsA, kMaxN, kSame);
  compare(tallies[tile_k], kind, deep_base,
          product<256, Major::k, Major::k, 2>(deep.a, deep.b, kMaxK), kRowsA, kMaxN, kSame);
  compare(tallies[tile_k], kind, deep_base,
          product<256, Major::k, Major::k, 8>(deep.a, deep.b, kMaxK), kRowsA, kMaxN, kSame);
  compare(tallies[tile_k], kind, deep_base,
          product<256, Major::k, Major::k, 16>(deep.a, deep.b, kMaxK), kRowsA, kMaxN, kSame);
  compare(tallies[overwrite], kind, deep_base,
          product<256, Major::k, Major::k, 1, true>(deep.a, deep.b, kMaxK), kRowsA, kMaxN, kSame);
  for (const int k : {128, 192, 256}) {
    const Matrix other = product<256>(data.a, data.b, k);
    compare(tallies[zero_steps], kind, base, other, kRowsA, kMaxN, kSame);
  }

  // b's first 64 rows on m, a's rows on n: the product, transposed.
  Data swapped{Matrix(kRowsA * kMaxK), Matrix(kMaxN * kMaxK, 0.0F)};
  std::copy_n(data.b.begin(), kRowsA * kMaxK, swapped.a.begin());
  std::copy_n(data.a.begin(), kRowsA * kMaxK, swapped.b.begin());
  const auto transposed = [](int i, int j) { return j * kMaxN + i; };
  compare(tallies[exchange], kind, base, product<64>(swapped.a, swapped.b, kDataK), kRowsA, kRowsA,
          transposed);
  compare(tallies[exchange], kind, base,
          product<256, Major::mn, Major::k>(swapped.a, swapped.b, kDataK), kRowsA, kRowsA,
          transposed);

  for (const int by : {1, 8, 16, 37}) {
    const Matrix moved_m = product<256>(rotate_rows(data.a, kRowsA, by), data.b, kDataK);
    compare(tallies[position_m], kind, base, moved_m, kRowsA, kMaxN,
            [&](int i, int j) { return (i + by) % kRowsA * kMaxN + j; });
    const Matrix moved_n = product<256>(data.a, rotate_rows(data.b, kMaxN, by), kDataK);
    compare(tallies[position_n], kind, base, moved_n, kRowsA, kMaxN,
            [&](int i, int j) { return i * kMaxN + (j + by) % kMaxN; });
  }
  // Odd rows of a and of b become infinities and NaNs; the even ones must not notice.
  Data spoiled = data;
  for (int r = 1; r < kMaxN; r += 2) {
    for (int k = 0; k < kMaxK; ++k) {
      const float bad = k % 2 == 0 ? INFINITY : NAN;
      if (r < kRowsA) spoiled.a[static_cast<std::size_t>(r * kMaxK + k)] = bad;
      spoiled.b[static_cast<std::size_t>(r * kMaxK + k)] = bad;
    }
  }
  const Matrix beside = product<256>(spoiled.a, spoiled.b, kDataK);
  for (int i = 0; i < kRowsA; i += 2) {
    for (int j = 0; j < kMaxN; j += 2) {
      tallies[neighbours].compared[kind]++;
      tallies[neighbours].differ[kind] += bits_of(base[static_cast<std::size_t>(i * kMaxN + j)]) !=
                                          bits_of(beside[static_cast<std::size_t>(i * kMaxN + j)]);
    }
  }
}

}  // namespace

int main() {
  Tally tallies[kNumVariants];
  constexpr int kSeeds = 8;
  for (int kind = 0; kind < kNumKinds; ++kind) {
    for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) probe(tallies, kind, seed);
  }
  std::printf("elements whose bits differ from the base form / compared, %d seeds\n", kSeeds);
  std::printf("%-46s", "variant");
  for (const char* kind : kKinds) std::printf(" %18s", kind);
  std::printf("\n");
  std::uint64_t differ = 0;
  for (int v = 0; v < kNumVariants; ++v) {
    std::printf("%-46s", kVariants[v]);
    for (int kind = 0; kind < kNumKinds; ++kind) {
      char cell[48];
      std::snprintf(cell, sizeof(cell), "%llu / %llu",
                    static_cast<unsigned long long>(tallies[v].differ[kind]),
                    static_cast<unsigned long long>(tallies[v].compared[kind]));
      std::printf(" %18s", cell);
      differ += tallies[v].differ[kind];
    }
    std::printf("\n");
  }
  std::printf("%s\n",
              differ == 0 ? "PASS bits depend on none of these" : "FAIL bits depend on a variant");
  return differ == 0 ? 0 : 1;
}
