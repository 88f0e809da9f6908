// SPDX-License-Identifier: Apache-2.0
// The driver on the CPU: how its functions are found, and its virtual-memory interface, over memory
// files that processes can map.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <iterator>
#include <string_view>

#include "cuda.h"
#include "cuda_runtime.h"

namespace {

constexpr std::size_t kStep = 2 << 20;

CUresult result_of(bool is_well) { return is_well ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
void* pointer_to(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

CUresult cuMemGetAllocationGranularity(std::size_t* step, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *step = kStep;
  return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                     const CUmemAllocationProp*, unsigned long long) {
  if (bytes == 0 || bytes % kStep != 0) return CUDA_ERROR_INVALID_VALUE;
  const int file = memfd_create("emulated GPU memory", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_INVALID_VALUE;
  if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return CUDA_ERROR_INVALID_VALUE;
  }
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return result_of(close(static_cast<int>(handle)) == 0);
}
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr,
                             unsigned long long) {
  void* place = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
  *address = reinterpret_cast<CUdeviceptr>(place);
  return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  return result_of(munmap(pointer_to(address), bytes) == 0);
}
// Out of reach until cuMemSetAccess, as on a GPU.
CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long) {
  return result_of(mmap(pointer_to(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        static_cast<int>(handle), static_cast<off_t>(offset)) != MAP_FAILED);
}
CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  return result_of(mmap(pointer_to(address), bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                        0) != MAP_FAILED);
}
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc*,
                        std::size_t) {
  return result_of(mprotect(pointer_to(address), bytes, PROT_READ | PROT_WRITE) == 0);
}
CUresult cuMemExportToShareableHandle(void* shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType, unsigned long long) {
  const int file = fcntl(static_cast<int>(handle), F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(shareable) = file;
  return result_of(file >= 0);
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shareable,
                                        CUmemAllocationHandleType) {
  const int given = static_cast<int>(reinterpret_cast<std::uintptr_t>(shareable));
  const int file = fcntl(given, F_DUPFD_CLOEXEC, 0);
  *handle = static_cast<CUmemGenericAllocationHandle>(file);
  return result_of(file >= 0);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  struct Entry {
    std::string_view name;
    void* function;
  };
  static const Entry entries[] = {
      {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&cuTensorMapEncodeTiled)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&cuMemGetAllocationGranularity)},
      {"cuMemCreate", reinterpret_cast<void*>(&cuMemCreate)},
      {"cuMemRelease", reinterpret_cast<void*>(&cuMemRelease)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&cuMemAddressReserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&cuMemAddressFree)},
      {"cuMemMap", reinterpret_cast<void*>(&cuMemMap)},
      {"cuMemUnmap", reinterpret_cast<void*>(&cuMemUnmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&cuMemSetAccess)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&cuMemExportToShareableHandle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&cuMemImportFromShareableHandle)},
  };
  *found = cudaDriverEntryPointNotFound;
  for (const Entry& known : entries) {
    if (known.name != name) continue;
    *entry = known.function;
    *found = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
