// SPDX-License-Identifier: Apache-2.0
#include "cuda/tensor_map.hpp"

#include "base/error.hpp"
#include "cuda/driver.hpp"

namespace uniep::cuda {
CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
  static auto* const encode =
      driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const bool is_bf16 = spec.element == MapElement::bf16;
  const std::uint64_t element_bytes = is_bf16 ? 2 : 4;
  std::array<cuuint64_t, 5> extents{};
  std::array<cuuint64_t, 4> pitch_bytes{};
  const std::array<cuuint32_t, 5> steps{1, 1, 1, 1, 1};
  const auto rank = static_cast<std::size_t>(spec.rank);
  for (std::size_t i = 0; i < rank; ++i) extents[i] = spec.extents[i];
  for (std::size_t i = 1; i < rank; ++i) pitch_bytes[i - 1] = spec.pitches[i] * element_bytes;
  CUtensorMap map;
  const CUresult result =
      encode(&map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
             static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.base), extents.data(),
             pitch_bytes.data(), spec.box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
             spec.swizzle_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw_world("the CUDA driver refused a tensor map of {} dimensions at {}: error {}", spec.rank,
                spec.base, static_cast<int>(result));
  }
  return map;
}

}  // namespace uniep::cuda
