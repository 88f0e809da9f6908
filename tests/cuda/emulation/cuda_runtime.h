// SPDX-License-Identifier: Apache-2.0
// Runs kernels on this machine's processors, so that their logic is tested where there is no GPU.
// CUDA threads are contexts that take turns. Of a kernel without clusters each block is a thread of
// the operating system, and shared memory is thread-local; a kernel with clusters runs in the thread
// that launches it, its shared memory is the launch's, and hopper.hpp is what it needs besides. Only
// what kernels and host code here use. It shows wrong indices, counts and barriers, but neither the
// GPU's memory order nor its speed.
#pragma once

#define UNIEP_CUDA_EMULATED 1

#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ thread_local

struct dim3 {
  dim3(unsigned x_size = 1) : x(x_size) {}
  unsigned x;
};
struct int2 {
  int x;
  int y;
};
struct float2 {
  float x;
  float y;
};
struct alignas(16) uint4 {
  std::uint32_t x, y, z, w;
};

namespace uniep::emulation {

// Of the CUDA thread that runs now.
extern thread_local dim3 thread_index;
extern thread_local dim3 block_index;

// Of the device; a program may set it before it does anything else.
inline int num_sms = 132;
// In which order CUDA threads take turns and copies are done: 0 is in turn, others at random.
inline std::uint64_t order_seed = 0;

// Lets other CUDA threads and blocks run.
void pause();
// Every thread of the block, or of the warp, brings a value and gets those of all, by thread.
const std::uint64_t* gather_block(std::uint64_t value);
const std::uint64_t* gather_warp(std::uint64_t value);
// Throw where a kernel does what it must not, or cannot end.
void run_blocks(unsigned blocks, unsigned threads, const std::function<void()>& kernel);
// In clusters of two.
void run_clusters(unsigned blocks, unsigned threads, std::size_t shared_bytes,
                  const std::function<void()>& kernel);

}  // namespace uniep::emulation

#define threadIdx ::uniep::emulation::thread_index
#define blockIdx ::uniep::emulation::block_index
// No macros: members have these names too.
extern thread_local dim3 gridDim;
extern thread_local dim3 blockDim;

inline void __syncthreads() { uniep::emulation::gather_block(0); }
int __syncthreads_or(int predicate);
inline void __syncwarp() { uniep::emulation::gather_warp(0); }
std::uint32_t __match_any_sync(std::uint32_t mask, std::int32_t value);
std::uint64_t gather_from(std::uint64_t value, std::uint32_t lane);
std::uint32_t __ballot_sync(std::uint32_t mask, bool predicate);
template <typename T>
T __shfl_sync(std::uint32_t, T value, int lane) {
  return static_cast<T>(
      gather_from(static_cast<std::uint64_t>(value), static_cast<std::uint32_t>(lane)));
}
inline float __shfl_sync(std::uint32_t, float value, int lane) {
  const std::uint64_t bits = std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>(
      static_cast<std::uint32_t>(gather_from(bits, static_cast<std::uint32_t>(lane))));
}
inline float __shfl_xor_sync(std::uint32_t, float value, int distance) {
  const std::uint64_t bits = std::bit_cast<std::uint32_t>(value);
  return std::bit_cast<float>(
      static_cast<std::uint32_t>(gather_from(bits, threadIdx.x % 32 ^ static_cast<unsigned>(distance))));
}
template <typename T>
T __shfl_up_sync(std::uint32_t, T value, std::uint32_t distance) {
  const std::uint32_t lane = threadIdx.x % 32;
  return static_cast<T>(gather_from(static_cast<std::uint64_t>(value), lane < distance ? lane : lane - distance));
}
inline int __popc(std::uint32_t bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline float __uint_as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t __float_as_uint(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename T>
T __ldcg(const T* pointer) {
  return *pointer;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline std::uint32_t min(std::uint32_t a, std::uint32_t b) { return a < b ? a : b; }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
template <typename T>
T atomicAdd(T* word, T value) {
  return std::atomic_ref<T>(*word).fetch_add(value);
}
inline void atomicMax(unsigned long long* word, unsigned long long value) {
  std::atomic_ref<unsigned long long> shared(*word);
  unsigned long long seen = shared.load();
  while (value > seen && !shared.compare_exchange_weak(seen, value)) {
  }
}
inline void atomicMin(unsigned long long* word, unsigned long long value) {
  std::atomic_ref<unsigned long long> shared(*word);
  unsigned long long seen = shared.load();
  while (value < seen && !shared.compare_exchange_weak(seen, value)) {
  }
}
inline unsigned long long atomicCAS_system(unsigned long long* word, unsigned long long expected,
                                           unsigned long long value) {
  std::atomic_ref<unsigned long long>(*word).compare_exchange_strong(expected, value);
  return expected;
}

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorNotReady
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrClockRate,
  cudaDevAttrComputeCapabilityMajor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative };
using cudaStream_t = struct EmulatedStream*;
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

const char* cudaGetErrorString(cudaError_t error);
cudaError_t allocate_emulated(void** pointer, std::size_t bytes);
template <typename T>
cudaError_t cudaMalloc(T** pointer, std::size_t bytes) {
  return allocate_emulated(reinterpret_cast<void**>(pointer), bytes);
}
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMemset(void* to, int value, std::size_t bytes);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
constexpr unsigned cudaStreamNonBlocking = 1;
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount      ? uniep::emulation::num_sms
           : attribute == cudaDevAttrComputeCapabilityMajor ? 9
                                                            : 0;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, std::size_t) {
  *blocks = 2;
  return cudaSuccess;
}
template <typename Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args),
                               const Args& args) {
  const bool has_clusters = config->attrs->val.cooperative == 0 && config->dynamicSmemBytes > 0;
  if (has_clusters) {
    uniep::emulation::run_clusters(config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes,
                                   [&] { kernel(args); });
  } else {
    uniep::emulation::run_blocks(config->gridDim.x, config->blockDim.x, [&] { kernel(args); });
  }
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                   cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}

// Kernels have ended when their launch returns, so an event is a time.
using cudaEvent_t = std::chrono::steady_clock::time_point*;
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new std::chrono::steady_clock::time_point();
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *event = std::chrono::steady_clock::now();
  return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = std::chrono::duration<float, std::milli>(*end - *start).count();
  return cudaSuccess;
}

struct cudaDeviceProp {
  char name[256];
  int major;
  int minor;
  int multiProcessorCount;
  std::size_t totalGlobalMem;
};
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointNotFound };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
