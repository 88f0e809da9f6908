// SPDX-License-Identifier: Apache-2.0
#include "cuda/shared_allocation.hpp"

#include <utility>

#include "cuda/driver.hpp"

namespace uniep::cuda {
namespace {

// The functions of the driver's virtual-memory interface.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      driver_function<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemCreate) create = driver_function<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver_function<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemAddressReserve) reserve =
      driver_function<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free_address =
      driver_function<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemMap) map = driver_function<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver_function<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access =
      driver_function<decltype(cuMemSetAccess)>("cuMemSetAccess");
  decltype(&cuMemExportToShareableHandle) export_handle =
      driver_function<decltype(cuMemExportToShareableHandle)>("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle =
      driver_function<decltype(cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle");
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

void check(CUresult result, const char* what, std::size_t bytes) {
  if (result != CUDA_SUCCESS) {
    throw_world("{} bytes of GPU memory that ranks share {}: the CUDA driver says error {}", bytes,
                what, static_cast<int>(result));
  }
}

CUmemLocation current_gpu() {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaFree(nullptr);  // makes the context
  if (error != cudaSuccess) {
    throw_world("no GPU for memory that ranks share: {}", cudaGetErrorString(error));
  }
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAllocationProp properties(const CUmemLocation& location) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  wanted.location = location;
  return wanted;
}

std::size_t round_up(std::int64_t bytes) {
  const CUmemAllocationProp wanted = properties(current_gpu());
  std::size_t step = 0;
  check(driver().granularity(&step, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "have no granularity", static_cast<std::size_t>(bytes));
  return (static_cast<std::size_t>(bytes) + step - 1) / step * step;
}

}  // namespace

SharedAllocation::SharedAllocation(std::int64_t bytes) : bytes_(round_up(bytes)) {
  const CUmemAllocationProp wanted = properties(current_gpu());
  CUmemGenericAllocationHandle handle{};
  check(driver().create(&handle, bytes_, &wanted, 0), "are not there", bytes_);
  handle_ = handle;
  map();
  cudaError_t error = cudaMemset(get(), 0, bytes_);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    SharedAllocation given_back(std::move(*this));
    throw_world("{} bytes of GPU memory that ranks share cannot be cleared: {}", given_back.bytes_,
                cudaGetErrorString(error));
  }
}

SharedAllocation::SharedAllocation(std::int64_t bytes, const Descriptor& descriptor)
    : bytes_(round_up(bytes)) {
  CUmemGenericAllocationHandle handle{};
  auto* const named = reinterpret_cast<void*>(static_cast<std::uintptr_t>(descriptor.get()));
  check(driver().import_handle(&handle, named, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cannot be taken over from another process", bytes_);
  handle_ = handle;
  map();
}

// Gives the handle back if it fails, since no destructor will.
void SharedAllocation::map() {
  CUdeviceptr address = 0;
  bool is_mapped = false;
  CUresult result = driver().reserve(&address, bytes_, 0, 0, 0);
  if (result == CUDA_SUCCESS) {
    result = driver().map(address, bytes_, 0, handle_, 0);
    is_mapped = result == CUDA_SUCCESS;
    if (is_mapped) {
      CUmemAccessDesc access{};
      access.location = current_gpu();
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      result = driver().set_access(address, bytes_, &access, 1);
    }
  }
  if (result != CUDA_SUCCESS) {
    if (is_mapped) driver().unmap(address, bytes_);
    if (address != 0) driver().free_address(address, bytes_);
    driver().release(handle_);
    check(result, "cannot be mapped; are its GPU and this one connected?", bytes_);
  }
  address_ = address;
}

SharedAllocation::SharedAllocation(SharedAllocation&& other) noexcept
    : address_(std::exchange(other.address_, 0)),
      handle_(std::exchange(other.handle_, 0)),
      bytes_(other.bytes_) {}

SharedAllocation::~SharedAllocation() {
  if (address_ == 0) return;
  driver().unmap(address_, bytes_);
  driver().free_address(address_, bytes_);
  driver().release(handle_);
}

std::byte* SharedAllocation::get() const { return reinterpret_cast<std::byte*>(address_); }

Descriptor SharedAllocation::share() const {
  int fd = -1;
  check(driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "have no descriptor for other processes", bytes_);
  return Descriptor(fd);
}

}  // namespace uniep::cuda
