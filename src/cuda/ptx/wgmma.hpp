// SPDX-License-Identifier: Apache-2.0
// wgmma.mma_async m64nNk16, bf16 by bf16 into fp32, both operands in shared memory as operand.hpp
// says. A warpgroup's accumulator: element 4j + i of lane l in warp w is row 16w + l / 4 + 8 (i /
// 2), column 8j + 2 (l % 4) + i % 2.
#pragma once

#include <cstdint>

#include "cuda/kernels/unroll.hpp"
#include "cuda/ptx/operand.hpp"

namespace uniep::cuda::ptx {

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

// mma: d += A B. start: d = A B, without reading d. Both run asynchronously and use the first kN /
// 2 registers of d.
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
#define UNIEP_R0(c) c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define UNIEP_R1(c) c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23]), c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31])
#define UNIEP_R2(c) c(d[32]), c(d[33]), c(d[34]), c(d[35]), c(d[36]), c(d[37]), c(d[38]), c(d[39]), c(d[40]), c(d[41]), c(d[42]), c(d[43]), c(d[44]), c(d[45]), c(d[46]), c(d[47])
#define UNIEP_R3(c) c(d[48]), c(d[49]), c(d[50]), c(d[51]), c(d[52]), c(d[53]), c(d[54]), c(d[55]), c(d[56]), c(d[57]), c(d[58]), c(d[59]), c(d[60]), c(d[61]), c(d[62]), c(d[63])
#define UNIEP_R4(c) c(d[64]), c(d[65]), c(d[66]), c(d[67]), c(d[68]), c(d[69]), c(d[70]), c(d[71]), c(d[72]), c(d[73]), c(d[74]), c(d[75]), c(d[76]), c(d[77]), c(d[78]), c(d[79])
#define UNIEP_R5(c) c(d[80]), c(d[81]), c(d[82]), c(d[83]), c(d[84]), c(d[85]), c(d[86]), c(d[87]), c(d[88]), c(d[89]), c(d[90]), c(d[91]), c(d[92]), c(d[93]), c(d[94]), c(d[95])
#define UNIEP_R6(c) c(d[96]), c(d[97]), c(d[98]), c(d[99]), c(d[100]), c(d[101]), c(d[102]), c(d[103]), c(d[104]), c(d[105]), c(d[106]), c(d[107]), c(d[108]), c(d[109]), c(d[110]), c(d[111])
#define UNIEP_R7(c) c(d[112]), c(d[113]), c(d[114]), c(d[115]), c(d[116]), c(d[117]), c(d[118]), c(d[119]), c(d[120]), c(d[121]), c(d[122]), c(d[123]), c(d[124]), c(d[125]), c(d[126]), c(d[127])
#define UNIEP_WGMMA_FUNCTION(name, n, regs, a, b, acc, ta, tb, ...)                              \
    __device__ __forceinline__ static void name(float (&d)[128], std::uint64_t desc_a,          \
                                                std::uint64_t desc_b) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " acc ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, "      \
                   a ", " b ", p, 1, 1, " ta ", " tb ";\n}"                                     \
                   : __VA_ARGS__                                                                \
                   : "l"(desc_a), "l"(desc_b), "n"(kA == Major::mn ? 1 : 0),                    \
                     "n"(kB == Major::mn ? 1 : 0));                                             \
    }
#define UNIEP_WGMMA(n, regs, a, b, ta, tb, outputs)                                             \
  template <Major kA, Major kB>                                                                 \
  struct Wgmma<n, kA, kB> {                                                                     \
    UNIEP_WGMMA_FUNCTION(mma, n, regs, a, b, "1", ta, tb, outputs("+f"))                        \
    UNIEP_WGMMA_FUNCTION(start, n, regs, a, b, "0", ta, tb, outputs("=f"))                      \
  };
#define UNIEP_OUTPUTS(c) UNIEP_R0(c)
UNIEP_WGMMA(32, UNIEP_D0, "%16", "%17", "%18", "%19", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c)
UNIEP_WGMMA(64, UNIEP_D0 ", " UNIEP_D1, "%32", "%33", "%34", "%35", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c)
UNIEP_WGMMA(96, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2, "%48", "%49", "%50", "%51", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c), UNIEP_R3(c)
UNIEP_WGMMA(128, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3, "%64", "%65", "%66", "%67", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c), UNIEP_R3(c), UNIEP_R4(c)
UNIEP_WGMMA(160, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4, "%80", "%81", "%82", "%83", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c), UNIEP_R3(c), UNIEP_R4(c), UNIEP_R5(c)
UNIEP_WGMMA(192, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5, "%96", "%97", "%98", "%99", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c), UNIEP_R3(c), UNIEP_R4(c), UNIEP_R5(c), UNIEP_R6(c)
UNIEP_WGMMA(224, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5 ", " UNIEP_D6, "%112", "%113", "%114", "%115", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#define UNIEP_OUTPUTS(c) UNIEP_R0(c), UNIEP_R1(c), UNIEP_R2(c), UNIEP_R3(c), UNIEP_R4(c), UNIEP_R5(c), UNIEP_R6(c), UNIEP_R7(c)
UNIEP_WGMMA(256, UNIEP_D0 ", " UNIEP_D1 ", " UNIEP_D2 ", " UNIEP_D3 ", " UNIEP_D4 ", " UNIEP_D5 ", " UNIEP_D6 ", " UNIEP_D7, "%128", "%129", "%130", "%131", UNIEP_OUTPUTS)
#undef UNIEP_OUTPUTS
#undef UNIEP_WGMMA
#undef UNIEP_WGMMA_FUNCTION
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
