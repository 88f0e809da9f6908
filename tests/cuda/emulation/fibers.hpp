// SPDX-License-Identifier: Apache-2.0
// CUDA threads as contexts that take turns on one thread of the operating system: what the emulated
// instructions need to know about who runs, and how one waits. A fiber that waits is not run again
// until somebody wakes it, so that a launch in which nothing can move is seen at once.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cuda_runtime.h"

// Under the thread sanitizer every CUDA thread is a thread to it, and only barriers and signals
// order their accesses: it finds missing ones, in shared memory too. The emulation's own state is
// hidden from it.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define UNIEP_SANITIZED
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#define UNIEP_HIDDEN __attribute__((no_sanitize_thread, noinline))
#else
#define UNIEP_HIDDEN
#define __tsan_acquire(object) static_cast<void>(object)
#define __tsan_release(object) static_cast<void>(object)
#define __tsan_get_current_fiber() nullptr
#define __tsan_create_fiber(flags) nullptr
#define __tsan_destroy_fiber(fiber) static_cast<void>(fiber)
#define __tsan_switch_to_fiber(fiber, flags) static_cast<void>(fiber)
#endif

namespace uniep::emulation {

struct Fiber;
struct Block;

// Fibers that wait for the same thing.
struct WaitList {
  Fiber* first = nullptr;
};

// Members meet, each with a value. Two sets of values, since a slow member may still read those of
// one meeting while the next gathers.
struct Meeting {
  explicit Meeting(unsigned size)
      : members(size), values(new std::uint64_t[2 * std::size_t{size}]) {}
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting() { delete[] values; }
  unsigned members;
  unsigned arrived = 0;
  std::uint64_t number = 0;
  std::uint64_t* values;
  WaitList waiting;
};

enum class Wait { block, warp, cluster, named, mbarrier };

// What a fiber waits for, for the report of a deadlock.
struct Waiting {
  Wait kind = Wait::block;
  std::uint32_t which = 0;   // number of a named barrier, or shared address of an mbarrier
  std::uint32_t detail = 0;  // members of a named barrier, or parity
};

// A product that was issued and runs when it is waited for.
struct Product {
  void (*run)(float* d, std::uint64_t a, std::uint64_t b, bool is_first);
  float* d;
  std::uint64_t a;
  std::uint64_t b;
  bool is_first;
  std::uint32_t group;
};

// What the asynchronous instructions of one CUDA thread have under way.
struct Asynchronous {
  static constexpr unsigned kMostProducts = 32;
  Product products[kMostProducts];
  unsigned num_products = 0;
  std::uint32_t product_groups = 0;  // committed ones
  std::uint32_t copy_groups = 0;
  std::uint32_t passed = 0;  // waits for mbarriers in a row that did not have to wait
};

// A bulk copy under way. Sources are read, and targets written, when it is run.
struct Copy {
  enum class Kind { load, store, add, word };
  Kind kind;
  CUtensorMap map;
  int coordinates[5];
  Block* block;           // that issued it; words: whose memory is written
  Fiber* fiber;           // that issued it
  std::uint32_t group;    // of the fiber's stores
  std::uint32_t address;  // shared
  std::uint32_t barrier;  // loads and words
  std::uint32_t blocks;   // loads: of the cluster, a bit each
  std::uint32_t value;    // words
};

// Of the fiber that runs.
Block& this_block();
Asynchronous& asynchronous();

std::uint8_t* shared_memory(Block& block);
std::uint32_t shared_bytes(const Block& block);
unsigned rank_in_cluster(const Block& block);
Block& block_of_cluster(const Block& block, unsigned rank);

// Until wake() of the list.
void wait_in(WaitList& list, const Waiting& waiting);
void wake(WaitList& list);
// Wakes the block's fibers that wait for the mbarrier at this shared address.
void wake_mbarrier(Block& block, std::uint32_t address);
void wait_for_mbarrier(const Waiting& waiting);

// All threads of the cluster, or `threads` threads of the block.
void sync_cluster();
void sync_named(int id, int threads);

// The scheduler runs copies between turns, when nothing else can go on at the latest.
void start_copy(const Copy& copy);
// Runs this fiber's stores of groups before `group`, oldest first.
void finish_stores(std::uint32_t group);
void run_copy(const Copy& copy);  // in hopper.cpp

// Ends the launch with an error that says what this fiber did wrong: at once, or after this turn.
[[noreturn]] void fail(const std::string& what);
void complain(const std::string& what);

// True every other time, at random, when the order of fibers is seeded.
bool toss();

}  // namespace uniep::emulation
