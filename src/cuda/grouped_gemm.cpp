// SPDX-License-Identifier: Apache-2.0
// From the caller's problems to the kernel's table: checks, tensor maps, launch.
#include "cuda/grouped_gemm.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"
#include "cuda/grouped_gemm_launch.hpp"
#include "cuda/tensor_map.hpp"

namespace uniep::cuda {
namespace {

using u64 = std::uint64_t;

const char* name(GemmOp op) {
  switch (op) {
    case GemmOp::fprop:
      return "fprop";
    case GemmOp::fprop_swiglu:
      return "fprop_swiglu";
    case GemmOp::dgrad:
      return "dgrad";
    case GemmOp::wgrad:
      return "wgrad";
  }
  return "?";
}

const char* name(ElementType type) {
  switch (type) {
    case ElementType::bf16:
      return "bf16";
    case ElementType::f32:
      return "f32";
    case ElementType::f16:
      return "f16";
    case ElementType::f8_e4m3:
      return "f8_e4m3";
  }
  return "?";
}

void check_types(GemmOp op, ElementType operand, ElementType out) {
  if (operand != ElementType::bf16) {
    throw_invalid("grouped GEMM operands are {}; only bf16 is supported", name(operand));
  }
  const bool gradient = op == GemmOp::dgrad || op == GemmOp::wgrad;
  if (out != ElementType::bf16 && !(gradient && out == ElementType::f32)) {
    throw_invalid("{} cannot write {}; it writes bf16{}", name(op), name(out),
                  gradient ? " or f32" : "");
  }
}

void check_experts(const ExpertRows& experts, std::size_t num_problems) {
  if (num_problems < 1 || num_problems > kMaxProblems) {
    throw_invalid("{} problems in one grouped GEMM; 1 to {} are valid", num_problems, kMaxProblems);
  }
  const int limit = kMaxGroups / static_cast<int>(num_problems);
  if (experts.num_experts < 1 || experts.num_experts > limit) {
    throw_invalid("{} local experts in a grouped GEMM of {} problems; 1 to {} are valid",
                  experts.num_experts, num_problems, limit);
  }
  constexpr std::int64_t kMaxRows = std::numeric_limits<std::int32_t>::max() - 4096;
  if (experts.capacity < 64 || experts.capacity % 64 != 0 || experts.capacity > kMaxRows) {
    throw_invalid("row capacity {}; a multiple of 64 from 64 to {} is valid", experts.capacity,
                  kMaxRows);
  }
  if (experts.starts == nullptr || experts.rows == nullptr) {
    throw_invalid("expert_starts or expert_rows is null; both must be device memory");
  }
}

void check_pointer(GemmOp op, const char* what, const void* pointer) {
  if (pointer == nullptr) throw_invalid("{} of {} is null", what, name(op));
  if (reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
    throw_invalid("{} of {} is at {}; a multiple of 16 bytes is needed", what, name(op), pointer);
  }
}

void check_extent(GemmOp op, const char* what, std::int64_t value, std::int64_t multiple) {
  constexpr std::int64_t kMax = 1 << 24;
  if (value < multiple || value > kMax || value % multiple != 0) {
    throw_invalid("{} of {} is {}; a multiple of {} from {} to {} is valid", what, name(op), value,
                  multiple, multiple, kMax);
  }
}

void check_problem(GemmOp op, ElementType out_type, const GroupedGemm& p) {
  check_extent(op, "n", p.n, op == GemmOp::fprop_swiglu ? 16 : 8);
  check_extent(op, "k", p.k, 8);
  if (op != GemmOp::dgrad) check_pointer(op, "x", p.x);
  if (op == GemmOp::dgrad || op == GemmOp::wgrad) check_pointer(op, "d_y", p.d_y);
  if (op != GemmOp::wgrad) check_pointer(op, "w", p.w);
  check_pointer(op, "out", p.out);
  if (op == GemmOp::fprop_swiglu) {
    check_pointer(op, "row_weights", p.row_weights);
    if (p.h != nullptr) check_pointer(op, "h", p.h);
  } else if (p.h != nullptr || p.row_weights != nullptr) {
    throw_invalid("h and row_weights belong to fprop_swiglu; leave them null for {}", name(op));
  }
  if (p.accumulate && (op != GemmOp::wgrad || out_type != ElementType::f32)) {
    throw_invalid("{} into {} cannot accumulate; only wgrad into f32 can", name(op),
                  name(out_type));
  }
}

// [outer, rows, columns], in boxes of `box_rows` by one swizzled row of 128 bytes.
CUtensorMap matrix_map(const void* base, MapElement element, u64 outer, u64 rows, u64 columns,
                       std::uint32_t box_rows) {
  const std::uint32_t row_elements = element == MapElement::bf16 ? 64 : 32;
  return make_tensor_map({.base = base,
                          .element = element,
                          .extents = {columns, rows, outer},
                          .pitches = {1, columns, rows * columns},
                          .box = {row_elements, box_rows, 1}});
}

// w1 [E_l, 2 * ffn, hidden] as [E_l, ffn / 8, gate or up, 8, hidden], so that a box interleaves 8
// gate rows with the 8 up rows of the same columns.
CUtensorMap gate_up_map(const void* base, u64 experts, u64 ffn, u64 hidden) {
  return make_tensor_map({.base = base,
                          .rank = 5,
                          .extents = {hidden, 8, 2, ffn / 8, experts},
                          .pitches = {1, hidden, ffn * hidden, 8 * hidden, 2 * ffn * hidden},
                          .box = {64, 8, 2, 4, 1}});
}

Problem make_problem(GemmOp op, ElementType out_type, const ExpertRows& experts,
                     const GroupedGemm& p, int band) {
  const auto num_experts = static_cast<u64>(experts.num_experts);
  const auto rows = static_cast<u64>(experts.capacity);
  const auto n = static_cast<u64>(p.n);
  const auto k = static_cast<u64>(p.k);
  const bool f32 = out_type == ElementType::f32;
  const MapElement out_element = f32 ? MapElement::f32 : MapElement::bf16;
  Problem problem{};
  problem.band = std::max(1, band);
  switch (op) {
    case GemmOp::fprop:
    case GemmOp::fprop_swiglu:
      problem.m_extent = static_cast<int>(n);
      problem.k_extent = static_cast<int>(k);
      problem.b = matrix_map(p.x, MapElement::bf16, 1, rows, k, 64);
      if (op == GemmOp::fprop) {
        problem.a = matrix_map(p.w, MapElement::bf16, num_experts, n, k, 64);
        problem.d = matrix_map(p.out, MapElement::bf16, 1, rows, n, 64);
        break;
      }
      problem.a = gate_up_map(p.w, num_experts, n / 2, k);
      problem.out = p.out;
      problem.h = p.h;
      problem.row_weights = p.row_weights;
      break;
    case GemmOp::dgrad:
      problem.m_extent = static_cast<int>(k);
      problem.k_extent = static_cast<int>(n);
      problem.a = matrix_map(p.w, MapElement::bf16, num_experts, n, k, 64);
      problem.b = matrix_map(p.d_y, MapElement::bf16, 1, rows, n, 64);
      problem.d = matrix_map(p.out, out_element, 1, rows, k, f32 ? 32 : 64);
      break;
    case GemmOp::wgrad:
      problem.m_extent = static_cast<int>(n);
      problem.n_extent = static_cast<int>(k);
      problem.a = matrix_map(p.d_y, MapElement::bf16, 1, rows, n, 64);
      problem.b = matrix_map(p.x, MapElement::bf16, 1, rows, k, 64);
      problem.d = matrix_map(p.out, out_element, num_experts, n, k, 64);
      problem.add = p.accumulate ? 1 : 0;
      break;
  }
  return problem;
}

}  // namespace

namespace {

cudaError_t launch_kernel(GemmOp op, ElementType out_type, const KernelArgs& args, int num_blocks,
                          cudaStream_t stream) {
  const bool f32 = out_type == ElementType::f32;
  switch (op) {
    case GemmOp::fprop:
      return launch_fprop(args, num_blocks, stream);
    case GemmOp::fprop_swiglu:
      return launch_fprop_swiglu(args, num_blocks, stream);
    case GemmOp::dgrad:
      return (f32 ? launch_dgrad_f32 : launch_dgrad)(args, num_blocks, stream);
    case GemmOp::wgrad:
      return (f32 ? launch_wgrad_f32 : launch_wgrad)(args, num_blocks, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int count_gemm_blocks(int wanted) {
  int device = 0, num_sms = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) {
    throw_world("no CUDA device for the grouped GEMM: {}", cudaGetErrorString(error));
  }
  if (major != 9) {
    throw_world("this GPU has compute capability {}.x; the grouped GEMM needs 9.0", major);
  }
  if (wanted != 0 && (wanted < 2 || wanted > num_sms)) {
    throw_invalid("{} SMs for a grouped GEMM; 2 to {}, or 0 for all, are valid", wanted, num_sms);
  }
  return (wanted == 0 ? num_sms : wanted) / 2 * 2;
}

KernelArgs make_kernel_args(GemmOp op, ElementType operand_type, ElementType out_type,
                            const ExpertRows& experts, std::span<const GroupedGemm> problems,
                            int band, std::uint32_t* tickets) {
  check_types(op, operand_type, out_type);
  check_experts(experts, problems.size());
  for (const GroupedGemm& problem : problems) check_problem(op, out_type, problem);
  KernelArgs args{};
  for (std::size_t i = 0; i < problems.size(); ++i) {
    args.problems[i] = make_problem(op, out_type, experts, problems[i], band);
  }
  args.expert_starts = experts.starts;
  args.expert_rows = experts.rows;
  args.tickets = tickets;
  args.num_problems = static_cast<int>(problems.size());
  args.num_experts = experts.num_experts;
  return args;
}

void launch_grouped_gemm(GemmOp op, ElementType out_type, const KernelArgs& args, int num_blocks,
                         cudaStream_t stream) {
  const cudaError_t error = launch_kernel(op, out_type, args, num_blocks, stream);
  if (error != cudaSuccess) {
    throw_world("the grouped GEMM did not launch: {}", cudaGetErrorString(error));
  }
}

void run_grouped_gemm(GemmOp op, ElementType operand_type, ElementType out_type,
                      const ExpertRows& experts, std::span<const GroupedGemm> problems,
                      const GemmLaunch& launch) {
  launch_grouped_gemm(
      op, out_type,
      make_kernel_args(op, operand_type, out_type, experts, problems, launch.band, launch.tickets),
      count_gemm_blocks(launch.num_sms), launch.stream);
}

}  // namespace uniep::cuda
