// SPDX-License-Identifier: Apache-2.0
#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "cuda_runtime.h"
#include "fibers.hpp"
#include "hopper.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes) static_cast<void>(start)
#endif

thread_local dim3 gridDim;
thread_local dim3 blockDim;

namespace uniep::emulation {

thread_local dim3 thread_index;
thread_local dim3 block_index;

namespace {

#ifdef UNIEP_SANITIZED
constexpr std::size_t kStackBytes = 256 << 10;
#else
constexpr std::size_t kStackBytes = 96 << 10;
#endif
constexpr std::uint64_t kStackEnd = 0x5AFE57AC0000E4D5;  // must stay at the far end of a stack

// A place to go on from. Between contexts that have started, a jump needs no system call, as
// swapcontext does; sanitizers know only the latter.
struct Place {
  ucontext_t state{};
#ifndef UNIEP_SANITIZED
  jmp_buf jump{};
#endif
};

UNIEP_HIDDEN void switch_places(Place& from, Place& to, bool to_started) {
#ifndef UNIEP_SANITIZED
  if (_setjmp(from.jump) != 0) return;
  if (to_started) _longjmp(to.jump, 1);
  setcontext(&to.state);
#else
  static_cast<void>(to_started);
  swapcontext(&from.state, &to.state);
#endif
}

// Stacks are used again: a launch has thousands.
class Stacks {
 public:
  std::unique_ptr<char[]> take() {
    const std::lock_guard lock(mutex_);
    if (spare_.empty()) return std::unique_ptr<char[]>(new char[kStackBytes]);
    auto stack = std::move(spare_.back());
    spare_.pop_back();
    return stack;
  }
  void give(std::unique_ptr<char[]> stack) {
    ASAN_UNPOISON_MEMORY_REGION(stack.get(), kStackBytes);
    const std::lock_guard lock(mutex_);
    spare_.push_back(std::move(stack));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<char[]>> spare_;
};

Stacks& stacks() {
  static Stacks all;
  return all;
}

struct NamedBarrier {
  unsigned members = 0;
  unsigned arrived = 0;
  WaitList waiting;
};

struct Run;

}  // namespace

struct Fiber {
  Place place;
  std::unique_ptr<char[]> stack;
  Block* block = nullptr;
  unsigned thread = 0;
  bool started = false;
  bool ended = false;
  bool waits = false;
  Waiting waiting;
  Fiber* next = nullptr;  // in a WaitList
  void* sanitizer = nullptr;
  Asynchronous asynchronous;
};

struct Block {
  Block(unsigned number, unsigned threads, std::uint32_t bytes)
      : index(number),
        num_threads(threads),
        fibers(new Fiber[threads]),
        all(threads),
        shared_size(bytes) {
    warps = std::make_unique<std::unique_ptr<Meeting>[]>((threads + 31) / 32);
    for (unsigned warp = 0; warp < (threads + 31) / 32; ++warp) {
      warps[warp] = std::make_unique<Meeting>(32);
    }
    if (bytes == 0) return;
    shared.reset(
        static_cast<std::uint8_t*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024)));
    std::memset(shared.get(), 0xC3, bytes);
  }
  struct Free {
    void operator()(std::uint8_t* bytes) const { std::free(bytes); }
  };
  unsigned index;
  unsigned num_threads;
  std::unique_ptr<Fiber[]> fibers;
  Meeting all;
  std::unique_ptr<std::unique_ptr<Meeting>[]> warps;
  NamedBarrier named[16];
  std::unique_ptr<std::uint8_t, Free> shared;
  std::uint32_t shared_size;
  unsigned ended = 0;
  // In a cluster.
  Block** cluster = nullptr;
  Meeting* cluster_meeting = nullptr;
  unsigned cluster_rank = 0;
};

namespace {

constexpr unsigned kMostCopies = 512;

// Blocks that share a thread of the operating system. No containers in what fibers touch: their
// members would not be hidden.
struct Run {
  const std::function<void()>* kernel = nullptr;
  Place scheduler;
  void* sanitizer = __tsan_get_current_fiber();
  Fiber* current = nullptr;
  // Those that can go on, a ring.
  Fiber** ready = nullptr;
  std::size_t capacity = 0;
  std::size_t head = 0;
  std::size_t num_ready = 0;
  unsigned num_fibers = 0;
  unsigned ended = 0;
  Copy* copies = nullptr;
  unsigned num_copies = 0;
  std::uint64_t random = 0;  // 0: in order
  const Block* slow = nullptr;
  unsigned slow_warp = 0;
  std::string* error = nullptr;
};

thread_local Run* running = nullptr;

UNIEP_HIDDEN std::uint64_t draw(Run& run) {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  run.random ^= run.random << 17;
  return run.random;
}

UNIEP_HIDDEN void push_ready(Run& run, Fiber* fiber) {
  run.ready[(run.head + run.num_ready++) % run.capacity] = fiber;
}

UNIEP_HIDDEN Fiber* pop_ready(Run& run) {
  if (run.random != 0) {
    // One warp is slow for a while: it goes on only when chance finds nobody else.
    if (draw(run) % 4096 == 0) {
      const Fiber* fiber = run.ready[(run.head + draw(run) % run.num_ready) % run.capacity];
      run.slow = fiber->block;
      run.slow_warp = fiber->thread / 32;
    }
    for (int attempt = 0; attempt < 4; ++attempt) {
      Fiber*& chosen = run.ready[(run.head + draw(run) % run.num_ready) % run.capacity];
      std::swap(chosen, run.ready[run.head]);
      const Fiber* fiber = run.ready[run.head];
      if (fiber->block != run.slow || fiber->thread / 32 != run.slow_warp) break;
    }
  }
  Fiber* const fiber = run.ready[run.head];
  run.head = run.head + 1 == run.capacity ? 0 : run.head + 1;
  --run.num_ready;
  return fiber;
}

UNIEP_HIDDEN void switch_out() {
  Fiber& self = *running->current;
  __tsan_switch_to_fiber(running->sanitizer, 1);
  switch_places(self.place, running->scheduler, true);
}

UNIEP_HIDDEN void context_main() {
  (*running->kernel)();
  Fiber& self = *running->current;
  __tsan_release(running);
  self.ended = true;
  ++running->ended;
  if (++self.block->ended == self.block->num_threads) {
    for (unsigned i = 0; i < running->num_copies; ++i) {
      const Copy& copy = running->copies[i];
      const bool writes_here = copy.kind == Copy::Kind::load &&
                               copy.block->cluster == self.block->cluster &&
                               (copy.blocks >> self.block->cluster_rank & 1U) != 0;
      if (copy.block == self.block || writes_here) {
        fail("ended while a bulk copy from or to its shared memory was under way");
      }
    }
  }
  switch_out();
}

UNIEP_HIDDEN const std::uint64_t* gather(Meeting& meeting, unsigned member, std::uint64_t value,
                                         Wait kind) {
  const std::uint64_t number = meeting.number;
  std::uint64_t* const values = meeting.values + number % 2 * meeting.members;
  values[member] = value;
  __tsan_release(&meeting);
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.number;
    wake(meeting.waiting);
  } else {
    wait_in(meeting.waiting, {kind, 0, meeting.members});
  }
  __tsan_acquire(&meeting);
  return values;
}

// By itself, since getcontext could return twice.
__attribute__((noinline)) void prepare(Place& place, char* stack) {
  getcontext(&place.state);
  place.state.uc_stack.ss_sp = stack;
  place.state.uc_stack.ss_size = kStackBytes;
  makecontext(&place.state, context_main, 0);
}

void start_fibers(Run& run, Block& block) {
  for (unsigned thread = 0; thread < block.num_threads; ++thread) {
    Fiber& fiber = block.fibers[thread];
    fiber.block = &block;
    fiber.thread = thread;
    fiber.stack = stacks().take();
    std::memcpy(fiber.stack.get(), &kStackEnd, sizeof(kStackEnd));
    fiber.sanitizer = __tsan_create_fiber(0);
    prepare(fiber.place, fiber.stack.get());
    push_ready(run, &fiber);
  }
}

UNIEP_HIDDEN void run_copy_at(Run& run, unsigned index) {
  const Copy copy = run.copies[index];
  for (unsigned i = index + 1; i < run.num_copies; ++i) run.copies[i - 1] = run.copies[i];
  --run.num_copies;
  Fiber* const current = std::exchange(run.current, copy.fiber);  // whose fault it is
  run_copy(copy);
  run.current = current;
}

UNIEP_HIDDEN void run_some_copy(Run& run) {
  run_copy_at(run, run.random != 0 ? static_cast<unsigned>(draw(run) % run.num_copies) : 0);
}

UNIEP_HIDDEN void take_turn(Run& run) {
  Fiber& fiber = *pop_ready(run);
  run.current = &fiber;
  thread_index.x = fiber.thread;
  block_index.x = fiber.block->index;
  __tsan_switch_to_fiber(fiber.sanitizer, fiber.started ? 1 : 0);
  const bool started = std::exchange(fiber.started, true);
  switch_places(run.scheduler, fiber.place, started);
}

std::string describe(const Block& block, const Waiting& waiting) {
  switch (waiting.kind) {
    case Wait::block:
      return fmt::format("__syncthreads ({} of {} threads are there)", block.all.arrived,
                         block.all.members);
    case Wait::warp:
      return "an instruction of the whole warp";
    case Wait::cluster:
      return fmt::format("the cluster's barrier ({} of {} threads are there)",
                         block.cluster_meeting->arrived, block.cluster_meeting->members);
    case Wait::named:
      return fmt::format("named barrier {} ({} of {} threads are there)", waiting.which,
                         block.named[waiting.which].arrived, waiting.detail);
    case Wait::mbarrier:
      return describe_mbarrier(block, waiting);
  }
  return "?";
}

// Who waits where: a line for each warp and what it waits for.
std::string describe_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  constexpr std::size_t kMost = 40;
  std::string text = "a deadlock in an emulated kernel, no thread can go on:";
  std::size_t lines = 0;
  for (const auto& block : blocks) {
    std::map<std::tuple<unsigned, Wait, std::uint32_t, std::uint32_t>, unsigned> counts;
    for (unsigned thread = 0; thread < block->num_threads; ++thread) {
      const Fiber& fiber = block->fibers[thread];
      if (fiber.ended) continue;
      ++counts[{thread / 32, fiber.waiting.kind, fiber.waiting.which, fiber.waiting.detail}];
    }
    for (const auto& [key, threads] : counts) {
      if (lines++ >= kMost) continue;
      const auto& [warp, kind, which, detail] = key;
      text += fmt::format("\n  block {} warp {}: {} threads wait for {}", block->index, warp,
                          threads, describe(*block, {kind, which, detail}));
    }
  }
  if (lines > kMost) text += fmt::format("\n  and {} more", lines - kMost);
  return text;
}

// Runs blocks on this thread to their end, or tells why that is not to be had.
std::optional<std::string> run_here(std::vector<std::unique_ptr<Block>>& blocks,
                                    const std::function<void()>& kernel, bool has_copies) {
  Run run;
  run.kernel = &kernel;
  for (const auto& block : blocks) run.num_fibers += block->num_threads;
  run.capacity = run.num_fibers;
  const std::unique_ptr<Fiber*[]> ready(new Fiber*[run.capacity]);
  run.ready = ready.get();
  const std::unique_ptr<Copy[]> copies(has_copies ? new Copy[kMostCopies] : nullptr);
  run.copies = copies.get();
  run.random = order_seed == 0 ? 0 : order_seed * 0x9E3779B97F4A7C15 + blocks.front()->index;
  Run* const outer = std::exchange(running, &run);
  for (const auto& block : blocks) start_fibers(run, *block);
  std::optional<std::string> wrong;
  constexpr std::uint64_t kTurnsPerCopy = 48;
  std::uint64_t turns = 0;
  std::size_t until_yield = run.num_ready;
  while (run.ended < run.num_fibers && run.error == nullptr) {
    if (run.num_ready > 0) take_turn(run);
    if (run.num_copies > 0 && (run.num_ready == 0 || ++turns % kTurnsPerCopy == 0)) {
      run_some_copy(run);
    } else if (run.num_ready == 0 && run.ended < run.num_fibers && run.error == nullptr) {
      wrong = describe_deadlock(blocks);
      break;
    }
    if (until_yield == 0 || --until_yield == 0) {
      std::this_thread::yield();
      until_yield = run.num_ready;
    }
  }
  if (run.error != nullptr) wrong = *run.error;
  delete run.error;
  for (const auto& block : blocks) {
    for (unsigned thread = 0; thread < block->num_threads; ++thread) {
      Fiber& fiber = block->fibers[thread];
      __tsan_acquire(&run);
      __tsan_destroy_fiber(fiber.sanitizer);
      if (!wrong && std::memcmp(fiber.stack.get(), &kStackEnd, sizeof(kStackEnd)) != 0) {
        wrong = "an emulated thread has overrun its stack; kStackBytes must grow";
      }
      stacks().give(std::move(fiber.stack));
    }
  }
  running = outer;
  return wrong;
}

void set_sizes(unsigned blocks, unsigned threads) {
  gridDim.x = blocks;
  blockDim.x = threads;
}

}  // namespace

UNIEP_HIDDEN Block& this_block() { return *running->current->block; }
UNIEP_HIDDEN Asynchronous& asynchronous() { return running->current->asynchronous; }
UNIEP_HIDDEN std::uint8_t* shared_memory(Block& block) { return block.shared.get(); }
UNIEP_HIDDEN std::uint32_t shared_bytes(const Block& block) { return block.shared_size; }
UNIEP_HIDDEN unsigned rank_in_cluster(const Block& block) { return block.cluster_rank; }
UNIEP_HIDDEN Block& block_of_cluster(const Block& block, unsigned rank) {
  return *block.cluster[rank];
}

UNIEP_HIDDEN void wait_in(WaitList& list, const Waiting& waiting) {
  Fiber& self = *running->current;
  self.waits = true;
  self.waiting = waiting;
  self.next = list.first;
  list.first = &self;
  switch_out();
}

UNIEP_HIDDEN void wake(WaitList& list) {
  for (Fiber* fiber = std::exchange(list.first, nullptr); fiber != nullptr; fiber = fiber->next) {
    fiber->waits = false;
    push_ready(*running, fiber);
  }
}

UNIEP_HIDDEN void wait_for_mbarrier(const Waiting& waiting) {
  Fiber& self = *running->current;
  self.waits = true;
  self.waiting = waiting;
  switch_out();
}

UNIEP_HIDDEN void wake_mbarrier(Block& block, std::uint32_t address) {
  for (unsigned thread = 0; thread < block.num_threads; ++thread) {
    Fiber& fiber = block.fibers.get()[thread];
    if (!fiber.waits || fiber.waiting.kind != Wait::mbarrier || fiber.waiting.which != address) {
      continue;
    }
    fiber.waits = false;
    push_ready(*running, &fiber);
  }
}

UNIEP_HIDDEN void start_copy(const Copy& copy) {
  if (running->num_copies == kMostCopies) run_some_copy(*running);
  running->copies[running->num_copies] = copy;
  running->copies[running->num_copies++].fiber = running->current;
}

UNIEP_HIDDEN void finish_stores(std::uint32_t group) {
  for (unsigned i = 0; i < running->num_copies;) {
    const Copy& copy = running->copies[i];
    const bool is_store = copy.kind == Copy::Kind::store || copy.kind == Copy::Kind::add;
    if (is_store && copy.fiber == running->current && copy.group < group) {
      run_copy_at(*running, i);
    } else {
      ++i;
    }
  }
}

void complain(const std::string& what) {
  if (running->error != nullptr) return;
  const Fiber& self = *running->current;
  running->error =
      new std::string(fmt::format("an emulated kernel, block {} thread {} (warp {}): {}",
                                  self.block->index, self.thread, self.thread / 32, what));
}

void fail(const std::string& what) {
  complain(what);
  for (;;) switch_out();
}

UNIEP_HIDDEN bool toss() { return running->random != 0 && draw(*running) % 2 == 0; }

UNIEP_HIDDEN void pause() {
  push_ready(*running, running->current);
  switch_out();
}

UNIEP_HIDDEN const std::uint64_t* gather_block(std::uint64_t value) {
  Block& block = this_block();
  return gather(block.all, thread_index.x, value, Wait::block);
}
UNIEP_HIDDEN const std::uint64_t* gather_warp(std::uint64_t value) {
  Block& block = this_block();
  return gather(*block.warps.get()[thread_index.x / 32], thread_index.x % 32, value, Wait::warp);
}

UNIEP_HIDDEN void sync_cluster() {
  Block& block = this_block();
  if (block.cluster == nullptr) fail("synchronises a cluster, and the launch has none");
  gather(*block.cluster_meeting, block.cluster_rank * block.num_threads + thread_index.x, 0,
         Wait::cluster);
}

UNIEP_HIDDEN void sync_named(int id, int threads) {
  Block& block = this_block();
  const auto members = static_cast<unsigned>(threads);
  if (id < 1 || id > 15) fail(fmt::format("named barrier {}; 1 to 15 are valid", id));
  NamedBarrier& barrier = block.named[id];
  if (barrier.arrived != 0 && barrier.members != members) {
    fail(fmt::format("named barrier {} of {} threads, where others wait for {}", id, members,
                     barrier.members));
  }
  barrier.members = members;
  __tsan_release(&barrier);
  if (++barrier.arrived == members) {
    barrier.arrived = 0;
    wake(barrier.waiting);
  } else {
    wait_in(barrier.waiting, {Wait::named, static_cast<std::uint32_t>(id), members});
  }
  __tsan_acquire(&barrier);
}

void run_blocks(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<std::optional<std::string>> wrong(blocks);
  {
    std::vector<std::jthread> list;
    for (unsigned index = 0; index < blocks; ++index) {
      list.emplace_back([=, &kernel, &wrong] {
        set_sizes(blocks, threads);
        std::vector<std::unique_ptr<Block>> block;
        block.push_back(std::make_unique<Block>(index, threads, 0));
        wrong[index] = run_here(block, kernel, false);
      });
    }
  }
  for (const auto& text : wrong) {
    if (text) throw_world("{}", *text);
  }
}

void run_clusters(unsigned blocks, unsigned threads, std::size_t shared_size,
                  const std::function<void()>& kernel) {
  constexpr unsigned kSize = 2;
  if (blocks % kSize != 0) throw_world("{} blocks in clusters of {}", blocks, kSize);
  std::vector<std::unique_ptr<Block>> list;
  for (unsigned index = 0; index < blocks; ++index) {
    list.push_back(
        std::make_unique<Block>(index, threads, static_cast<std::uint32_t>(shared_size)));
  }
  std::vector<std::unique_ptr<Meeting>> meetings;
  std::vector<Block*> members;
  for (const auto& block : list) members.push_back(block.get());
  for (unsigned index = 0; index < blocks; ++index) {
    if (index % kSize == 0) meetings.push_back(std::make_unique<Meeting>(kSize * threads));
    list[index]->cluster = members.data() + index / kSize * kSize;
    list[index]->cluster_meeting = meetings.back().get();
    list[index]->cluster_rank = index % kSize;
  }
  set_sizes(blocks, threads);
  if (const auto wrong = run_here(list, kernel, true)) throw_world("{}", *wrong);
}

}  // namespace uniep::emulation

UNIEP_HIDDEN int __syncthreads_or(int predicate) {
  using namespace uniep::emulation;
  const std::uint64_t* values = gather_block(predicate != 0 ? 1 : 0);
  std::uint64_t any = 0;
  for (unsigned thread = 0; thread < blockDim.x; ++thread) any |= values[thread];
  return static_cast<int>(any);
}

UNIEP_HIDDEN std::uint32_t __match_any_sync(std::uint32_t, std::int32_t value) {
  const auto word = static_cast<std::uint64_t>(value);
  const std::uint64_t* values = uniep::emulation::gather_warp(word);
  std::uint32_t same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) same |= values[lane] == word ? 1U << lane : 0;
  return same;
}

UNIEP_HIDDEN std::uint32_t __ballot_sync(std::uint32_t, bool predicate) {
  const std::uint64_t* values = uniep::emulation::gather_warp(predicate ? 1 : 0);
  std::uint32_t set = 0;
  for (unsigned lane = 0; lane < 32; ++lane) set |= values[lane] != 0 ? 1U << lane : 0;
  return set;
}

UNIEP_HIDDEN std::uint64_t gather_from(std::uint64_t value, std::uint32_t lane) {
  return uniep::emulation::gather_warp(value)[lane];
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "out of memory";
}
// Garbage at first, as on a GPU.
cudaError_t allocate_emulated(void** pointer, std::size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*pointer == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*pointer, 0xC3, bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {.name = "a GPU emulated on this CPU",
                 .major = 9,
                 .minor = 0,
                 .multiProcessorCount = uniep::emulation::num_sms,
                 .totalGlobalMem = std::size_t{1} << 33};
  return cudaSuccess;
}
