// SPDX-License-Identifier: Apache-2.0
#include "hopper.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"

namespace uniep::emulation {
namespace {

constexpr int kClusterShift = 24;
constexpr std::uint64_t kMbarrierMagic = 0x5B4;

// An mbarrier's 64 bits: phase 1, pending arrivals 13, arrivals of a phase 13, pending bytes 24
// with an offset, magic.
struct Mbarrier {
  unsigned phase;
  unsigned pending;
  unsigned expected;
  int bytes;
};
constexpr int kBytesOffset = 1 << 23;

UNIEP_HIDDEN std::uint64_t pack(const Mbarrier& m) {
  return m.phase | std::uint64_t{m.pending} << 1 | std::uint64_t{m.expected} << 14 |
         static_cast<std::uint64_t>(m.bytes + kBytesOffset) << 27 | kMbarrierMagic << 51;
}

UNIEP_HIDDEN bool unpack(std::uint64_t word, Mbarrier& m) {
  m.phase = static_cast<unsigned>(word & 1U);
  m.pending = static_cast<unsigned>(word >> 1 & 0x1FFFU);
  m.expected = static_cast<unsigned>(word >> 14 & 0x1FFFU);
  m.bytes = static_cast<int>(word >> 27 & 0xFFFFFFU) - kBytesOffset;
  return word >> 51 == kMbarrierMagic;
}

std::string name_of(std::uint32_t address) {
  const std::string name = name_of_shared != nullptr ? name_of_shared(address) : "";
  return name.empty() ? fmt::format("the mbarrier at shared address {}", address)
                      : fmt::format("mbarrier {}", name);
}

UNIEP_HIDDEN std::uint64_t& word_of(Block& block, std::uint32_t address) {
  if (address % 8 != 0 || std::uint64_t{address} + 8 > shared_bytes(block)) {
    fail(fmt::format("an mbarrier at shared address {} of {} bytes", address, shared_bytes(block)));
  }
  return *reinterpret_cast<std::uint64_t*>(shared_memory(block) + address);
}

UNIEP_HIDDEN Block& block_at(std::uint32_t cluster_address) {
  const std::uint32_t rank = cluster_address >> kClusterShift;
  return rank == 0 ? this_block() : block_of_cluster(this_block(), rank - 1);
}
std::uint32_t offset_of(std::uint32_t cluster_address) {
  return cluster_address & ((1U << kClusterShift) - 1);
}

// arrivals and bytes are taken off what is pending; a phase whose both are 0 is complete.
UNIEP_HIDDEN void advance(Block& block, std::uint32_t address, unsigned arrivals, int bytes) {
  std::uint64_t& word = word_of(block, address);
  __tsan_acquire(&word);
  __tsan_release(&word);
  Mbarrier m;
  if (!unpack(word, m)) {
    complain(name_of(address) + " is used before it is initialised");
    return;
  }
  if (arrivals > m.pending) {
    complain(fmt::format("{} arrivals at {}, where {} are pending", arrivals, name_of(address),
                         m.pending));
    return;
  }
  m.pending -= arrivals;
  m.bytes -= bytes;
  if (m.bytes <= -(1 << 20) || m.bytes >= 1 << 20) {
    complain(fmt::format("{} bytes pending at {}", m.bytes, name_of(address)));
    return;
  }
  const bool is_complete = m.pending == 0 && m.bytes == 0;
  if (is_complete) {
    m.phase ^= 1U;
    m.pending = m.expected;
  }
  word = pack(m);
  if (is_complete) wake_mbarrier(block, address);
}

// The swizzle is a function of the address: 16-byte chunks within 1 KiB or 512 bytes trade places.
UNIEP_HIDDEN std::uint32_t swizzle(std::uint32_t address, std::uint32_t span) {
  return span == 128 ? address ^ (address >> 7 & 7U) << 4 : address ^ (address >> 7 & 3U) << 4;
}

std::uint32_t box_bytes(const CUtensorMap& map) {
  std::uint32_t bytes = map.element_bytes;
  for (const std::uint32_t size : map.box) bytes *= size;
  return bytes;
}

void check_copy(const CUtensorMap& map, std::uint32_t address) {
  if (map.magic != CUtensorMap::kMagic) fail("a copy's tensor map is none");
  if (address % 128 != 0 || std::uint64_t{address} + box_bytes(map) > shared_bytes(this_block())) {
    fail(fmt::format("a copy of {} bytes at shared address {} of {}", box_bytes(map), address,
                     shared_bytes(this_block())));
  }
}

// Walks the rows of a box: body(place of the row in shared memory, global place of its first
// element or nullptr if outside, first element inside, end of those inside).
template <typename Body>
void for_each_row(const Copy& copy, Body body) {
  const CUtensorMap& map = copy.map;
  const std::int64_t first = copy.coordinates[0];
  const std::int64_t extent = static_cast<std::int64_t>(map.extents[0]);
  const int begin = static_cast<int>(std::clamp<std::int64_t>(-first, 0, map.box[0]));
  const int end = static_cast<int>(std::clamp<std::int64_t>(extent - first, begin, map.box[0]));
  std::uint32_t row = 0;
  std::array<std::uint32_t, 5> i{};
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1]) {
          std::int64_t offset = first * map.element_bytes;
          bool is_inside = begin < end;
          for (std::size_t d = 1; d < 5; ++d) {
            const std::int64_t index = std::int64_t{copy.coordinates[d]} + i[d];
            is_inside =
                is_inside && index >= 0 && index < static_cast<std::int64_t>(map.extents[d]);
            offset += index * static_cast<std::int64_t>(map.pitch_bytes[d - 1]);
          }
          body(copy.address + row * map.box[0] * map.element_bytes,
               is_inside ? map.base + offset : nullptr, begin, end);
          ++row;
        }
      }
    }
  }
}

// Parts of a row that lie in one 16-byte chunk: body(shared address, element, bytes).
template <typename Body>
void for_each_chunk(const CUtensorMap& map, std::uint32_t row, int begin, int end, Body body) {
  const int size = static_cast<int>(map.element_bytes);
  const int per_chunk = 16 / size;
  for (int element = begin; element < end;) {
    const int next = std::min(end, (element / per_chunk + 1) * per_chunk);
    body(swizzle(row + static_cast<std::uint32_t>(element * size), map.swizzle_bytes), element,
         static_cast<std::size_t>((next - element) * size));
    element = next;
  }
}

void run_load(const Copy& copy) {
  const CUtensorMap& map = copy.map;
  for (std::uint32_t rank = 0; copy.blocks >> rank != 0; ++rank) {
    if ((copy.blocks >> rank & 1U) == 0) continue;
    Block& block = block_of_cluster(*copy.block, rank);
    std::uint8_t* const shared = shared_memory(block);
    for_each_row(copy, [&](std::uint32_t row, const char* global, int begin, int end) {
      std::memset(shared + row, 0, std::size_t{map.box[0]} * map.element_bytes);
      if (global == nullptr) return;
      for_each_chunk(map, row, begin, end, [&](std::uint32_t to, int element, std::size_t bytes) {
        std::memcpy(shared + to, global + element * static_cast<int>(map.element_bytes), bytes);
      });
    });
    advance(block, copy.barrier, 0, static_cast<int>(box_bytes(map)));
  }
}

void run_store(const Copy& copy) {
  const CUtensorMap& map = copy.map;
  const std::uint8_t* const shared = shared_memory(*copy.block);
  for_each_row(copy, [&](std::uint32_t row, char* global, int begin, int end) {
    if (global == nullptr) return;
    for_each_chunk(map, row, begin, end, [&](std::uint32_t from, int element, std::size_t bytes) {
      char* const to = global + element * static_cast<int>(map.element_bytes);
      if (copy.kind == Copy::Kind::store) {
        std::memcpy(to, shared + from, bytes);
        return;
      }
      for (std::size_t i = 0; i < bytes; i += 4) {
        float sum, addend;
        std::memcpy(&sum, to + i, 4);
        std::memcpy(&addend, shared + from + i, 4);
        sum += addend;
        std::memcpy(to + i, &sum, 4);
      }
    });
  });
}

void run_word(const Copy& copy) {
  std::memcpy(shared_memory(*copy.block) + copy.address, &copy.value, 4);
  advance(*copy.block, copy.barrier, 0, 4);
}

void run_products(std::uint32_t group) {
  Asynchronous& mine = asynchronous();
  unsigned done = 0;
  for (; done < mine.num_products && mine.products[done].group < group; ++done) {
    const Product& product = mine.products[done];
    product.run(product.d, product.a, product.b, product.is_first);
  }
  std::copy(mine.products + done, mine.products + mine.num_products, mine.products);
  mine.num_products -= done;
}

}  // namespace

std::uint32_t shared_address_of(const void* pointer) {
  const std::uint8_t* const base = shared_memory(this_block());
  const auto* const byte = static_cast<const std::uint8_t*>(pointer);
  if (byte < base || byte >= base + shared_bytes(this_block())) {
    fail("the shared address of something that is not in the block's dynamic shared memory");
  }
  return static_cast<std::uint32_t>(byte - base);
}

std::uint8_t* shared_at(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment) {
  if (address % alignment != 0 || std::uint64_t{address} + bytes > shared_bytes(this_block())) {
    fail(fmt::format("{} bytes at shared address {} of {}; a multiple of {} is valid", bytes,
                     address, shared_bytes(this_block()), alignment));
  }
  return shared_memory(this_block()) + address;
}

std::uint32_t map_to_cluster(std::uint32_t address, std::uint32_t rank) {
  return (rank + 1) << kClusterShift | address;
}

UNIEP_HIDDEN void init_mbarrier(std::uint32_t barrier, std::uint32_t count) {
  word_of(this_block(), barrier) = pack({0, count, count, 0});
}

UNIEP_HIDDEN void arrive_mbarrier(std::uint32_t cluster_barrier, std::uint32_t count,
                                  std::uint32_t bytes) {
  if (toss()) pause();
  Block& block = block_at(cluster_barrier);
  const std::uint32_t address = offset_of(cluster_barrier);
  if (bytes != 0) advance(block, address, 0, -static_cast<int>(bytes));
  advance(block, address, count, 0);
}

UNIEP_HIDDEN void wait_mbarrier(std::uint32_t barrier, std::uint32_t parity) {
  Block& block = this_block();
  std::uint64_t& word = word_of(block, barrier);
  if (toss()) pause();
  // No ring is so deep: a role that forgot to go on finds the same phase again and again.
  constexpr std::uint32_t kMostPassed = 1U << 16;
  if (++asynchronous().passed > kMostPassed) fail("turns in a circle at " + name_of(barrier));
  for (;;) {
    Mbarrier m;
    if (!unpack(word, m)) fail("waits for " + name_of(barrier) + ", which is not initialised");
    if (m.phase != parity) break;
    // Woken when a phase ends; that it was the right one is looked at when the turn comes, as by
    // the polling instruction.
    wait_for_mbarrier({Wait::mbarrier, barrier, parity});
    asynchronous().passed = 0;
  }
  __tsan_acquire(&word);
}

void send_word(std::uint32_t cluster_barrier, std::uint32_t cluster_address, std::uint32_t value) {
  arrive_mbarrier(cluster_barrier, 1, 4);
  Copy copy{};
  copy.kind = Copy::Kind::word;
  copy.block = &block_at(cluster_address);
  copy.address = offset_of(cluster_address);
  copy.barrier = offset_of(cluster_barrier);
  copy.value = value;
  start_copy(copy);
}

std::string describe_mbarrier(const Block& block, const Waiting& waiting) {
  std::uint64_t word;
  std::memcpy(&word, shared_memory(const_cast<Block&>(block)) + waiting.which, 8);
  Mbarrier m;
  if (!unpack(word, m)) return name_of(waiting.which) + ", which is not initialised";
  return fmt::format("{}, parity {} (phase {}, {} of {} arrivals and {} bytes are missing)",
                     name_of(waiting.which), waiting.detail, m.phase, m.pending, m.expected,
                     m.bytes);
}

void load_tensor(std::uint32_t destination, const CUtensorMap& map, std::uint32_t barrier,
                 std::uint32_t blocks, const Coordinates& coordinates) {
  check_copy(map, destination);
  word_of(this_block(), barrier);
  Copy copy{};
  copy.kind = Copy::Kind::load;
  copy.map = map;
  std::copy(coordinates.begin(), coordinates.end(), copy.coordinates);
  copy.block = &this_block();
  copy.address = destination;
  copy.barrier = barrier;
  copy.blocks = blocks != 0 ? blocks : 1U << rank_in_cluster(this_block());
  start_copy(copy);
}

void store_tensor(Copy::Kind kind, const CUtensorMap& map, std::uint32_t source,
                  const Coordinates& coordinates) {
  check_copy(map, source);
  if (kind == Copy::Kind::add && map.element_bytes != 4) fail("adds a tensor that is not of fp32");
  Copy copy{};
  copy.kind = kind;
  copy.map = map;
  std::copy(coordinates.begin(), coordinates.end(), copy.coordinates);
  copy.block = &this_block();
  copy.address = source;
  copy.group = asynchronous().copy_groups;
  start_copy(copy);
}

void commit_stores() { ++asynchronous().copy_groups; }

void wait_stores(std::uint32_t pending) {
  const std::uint32_t groups = asynchronous().copy_groups;
  if (groups > pending) finish_stores(groups - pending);
}

void issue_product(const Product& product) {
  Asynchronous& mine = asynchronous();
  if (mine.num_products == Asynchronous::kMostProducts) {
    fail(fmt::format("more than {} products under way", Asynchronous::kMostProducts));
  }
  mine.products[mine.num_products] = product;
  mine.products[mine.num_products++].group = mine.product_groups;
}

// They may be through at once.
void commit_products() {
  ++asynchronous().product_groups;
  if (toss()) run_products(asynchronous().product_groups);
}

void wait_products(std::uint32_t pending) {
  const std::uint32_t groups = asynchronous().product_groups;
  if (groups > pending) run_products(groups - pending);
}

void run_copy(const Copy& copy) {
  switch (copy.kind) {
    case Copy::Kind::load:
      return run_load(copy);
    case Copy::Kind::store:
    case Copy::Kind::add:
      return run_store(copy);
    case Copy::Kind::word:
      return run_word(copy);
  }
}

}  // namespace uniep::emulation

// As the driver does, refuses what the copies could not follow.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* extents,
                                const cuuint64_t* pitch_bytes, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzled, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  if (rank < 3 || rank > 5 || base == nullptr || reinterpret_cast<std::uintptr_t>(base) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUtensorMap m{};
  m.base = static_cast<char*>(base);
  m.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 4;
  m.swizzle_bytes = swizzled == CU_TENSOR_MAP_SWIZZLE_128B ? 128 : 64;
  for (std::size_t i = 0; i < 5; ++i) {
    m.extents[i] = i < rank ? extents[i] : 1;
    m.box[i] = i < rank ? box[i] : 1;
    if (m.extents[i] < 1 || m.extents[i] > std::uint64_t{1} << 32) return CUDA_ERROR_INVALID_VALUE;
    if (m.box[i] < 1 || m.box[i] > 256 || (i < rank && steps[i] != 1)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i == 0 || i >= rank) continue;
    m.pitch_bytes[i - 1] = pitch_bytes[i - 1];
    if (pitch_bytes[i - 1] % 16 != 0 || pitch_bytes[i - 1] >= std::uint64_t{1} << 40) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  if (m.box[0] * m.element_bytes != m.swizzle_bytes) return CUDA_ERROR_INVALID_VALUE;
  m.magic = CUtensorMap::kMagic;
  *map = m;
  return CUDA_SUCCESS;
}
