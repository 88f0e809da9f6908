// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async m64nNk16, bf16 by bf16 into fp32, both operands in shared memory with the
// 128-byte swizzle. A box is 64 rows of 128 bytes (8 KiB, aligned to 1 KiB): K-major boxes hold 64
// values of m or n, each with 64 values of k; MN-major boxes hold 64 values of k, each with 64
// values of m or n. A warpgroup's accumulator: element 4j + i of lane l in warp w is row 16w + l /
// 4 + 8 (i / 2), column 8j + 2 (l % 4) + i % 2.
#pragma once

#include <cstdint>

#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/operand.hpp"

namespace uniep::cuda::ptx {

// Describes an operand that starts at `address`, in boxes that follow each other. The strides
// between 8-row groups (1 KiB) and between boxes are those of the layout above for both majors;
// K-major operands ignore the second.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kSwizzle128 = 1;
  return static_cast<std::uint64_t>((address & 0x3FFFFU) >> 4) |
         (static_cast<std::uint64_t>(kBoxBytes >> 4) << 16) |
         (static_cast<std::uint64_t>(1024 >> 4) << 32) | (kSwizzle128 << 62);
}

// What a step of 16 in k adds to a descriptor: 32 bytes along a swizzled row, or 16 rows.
template <Major kMajor>
inline constexpr std::uint64_t kDescriptorStep = kMajor == Major::k ? 32 >> 4 : 16 * 128 >> 4;

// Orders register accesses and earlier shared-memory accesses before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// At most kPending committed groups are unfinished; the operands of the others may be overwritten.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses of the first kCount accumulators across this point.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[128]) {
  UNIEP_UNROLL for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = A B + (accumulate ? d : 0), asynchronously; uses the first kN / 2 registers of d.
template <int kN, Major kA, Major kB>
struct Wgmma;

// clang-format off
#define UNIEP_D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define UNIEP_D1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UNIEP_D2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define UNIEP_D3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define UNIEP_D4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define UNIEP_D5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define UNIEP_D6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define UNIEP_D7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define UNIEP_R0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define UNIEP_R1 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define UNIEP_R2 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define UNIEP_R3 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define UNIEP_R4 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define UNIEP_R5 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define UNIEP_R6 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define UNIEP_R7 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define UNIEP_WGMMA(n, regs, a, b, acc, ta, tb, ...)                                           \
  template <Major kA, Major kB>                                                                 \
  struct Wgmma<n, kA, kB> {                                                                     \
    __device__ __forceinline__ static void mma(float (&d)[128], std::uint64_t desc_a,           \
                                               std::uint64_t desc_b, int accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " acc ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, "      \
                   a ", " b ", p, 1, 1, " ta ", " tb ";\n}"                                     \
                   : __VA_ARGS__                                                                \
                   : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(kA == Major::mn ? 1 : 0),   \
                     "n"(kB == Major::mn ? 1 : 0));                                             \
    }                                                                                           \
  };
UNIEP_WGMMA(32, UNIEP_D0, "%16", "%17", "%18", "%19", "%20", UNIEP_R0)
UNIEP_WGMMA(64, UNIEP_D0 ", " UNIEP_D1, "%32", "%33", "%34", "%35", "%36", UNIEP_R0, UNIEP_R1)
UNIEP_WGMMA(96, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2, "%48", "%49", "%50", "%51", "%52", UNIEP_R0, UNIEP_R1, UNIEP_R2)
UNIEP_WGMMA(128, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3, "%64", "%65", "%66", "%67", "%68", UNIEP_R0, UNIEP_R1, UNIEP_R2, UNIEP_R3)
UNIEP_WGMMA(160, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4, "%80", "%81", "%82", "%83", "%84", UNIEP_R0, UNIEP_R1, UNIEP_R2, UNIEP_R3, UNIEP_R4)
UNIEP_WGMMA(192, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5, "%96", "%97", "%98", "%99", "%100", UNIEP_R0, UNIEP_R1, UNIEP_R2, UNIEP_R3, UNIEP_R4, UNIEP_R5)
UNIEP_WGMMA(224, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5 ", " UNIEP_D6, "%112", "%113", "%114", "%115", "%116", UNIEP_R0, UNIEP_R1, UNIEP_R2, UNIEP_R3, UNIEP_R4, UNIEP_R5, UNIEP_R6)
UNIEP_WGMMA(256, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5 ", " UNIEP_D6 ", " UNIEP_D7, "%128", "%129", "%130", "%131", "%132", UNIEP_R0, UNIEP_R1, UNIEP_R2, UNIEP_R3, UNIEP_R4, UNIEP_R5, UNIEP_R6, UNIEP_R7)
#undef UNIEP_WGMMA
#undef UNIEP_D0
#undef UNIEP_R0
#undef UNIEP_D1
#undef UNIEP_R1
#undef UNIEP_D2
#undef UNIEP_R2
#undef UNIEP_D3
#undef UNIEP_R3
#undef UNIEP_D4
#undef UNIEP_R4
#undef UNIEP_D5
#undef UNIEP_R5
#undef UNIEP_D6
#undef UNIEP_R6
#undef UNIEP_D7
#undef UNIEP_R7
// clang-format on

}  // namespace uniep::cuda::ptx
