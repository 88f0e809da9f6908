// SPDX-License-Identifier: Apache-2.0
// What the stand-ins for src/cuda/ptx/ call: mbarriers, tensor copies and products as the PTX
// manual says they behave, as late as it allows. A copy is run between turns of the CUDA threads, a
// product when it is waited for; who reads or overwrites too early gets wrong values here. Proxy
// fences do nothing: a missing one is not seen.
//
// Shared addresses count from the beginning of the block's dynamic shared memory. In a cluster
// address the upper byte holds the block's rank plus one.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "fibers.hpp"

namespace uniep::emulation {

using Coordinates = std::array<int, 5>;

// Says what lies at a shared address, for reports; a program's kernels may set it.
inline std::string (*name_of_shared)(std::uint32_t address) = nullptr;

std::uint32_t shared_address_of(const void* pointer);
// `bytes` bytes of this block at a shared address, a multiple of `alignment`.
std::uint8_t* shared_at(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment);
std::uint32_t map_to_cluster(std::uint32_t address, std::uint32_t rank);

void init_mbarrier(std::uint32_t barrier, std::uint32_t count);
void arrive_mbarrier(std::uint32_t cluster_barrier, std::uint32_t count, std::uint32_t bytes);
void wait_mbarrier(std::uint32_t barrier, std::uint32_t parity);
void send_word(std::uint32_t cluster_barrier, std::uint32_t cluster_address, std::uint32_t value);
std::string describe_mbarrier(const Block& block, const Waiting& waiting);

// blocks: of the cluster, a bit each; 0 is this one.
void load_tensor(std::uint32_t destination, const CUtensorMap& map, std::uint32_t barrier,
                 std::uint32_t blocks, const Coordinates& coordinates);
void store_tensor(Copy::Kind kind, const CUtensorMap& map, std::uint32_t source,
                  const Coordinates& coordinates);
void commit_stores();
void wait_stores(std::uint32_t pending);

void issue_product(const Product& product);
void commit_products();
void wait_products(std::uint32_t pending);

}  // namespace uniep::emulation
