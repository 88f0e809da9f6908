// SPDX-License-Identifier: Apache-2.0
#include <setjmp.h>
#include <ucontext.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

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

thread_local dim3 thread_index;
thread_local dim3 block_index;

namespace {

constexpr std::size_t kStackBytes = 64 << 10;

// Members meet, each with a value. Two sets of values, since a slow member may still read those of
// one meeting while the next gathers.
struct Meeting {
  explicit Meeting(unsigned size = 32) : members(size) {}
  static constexpr unsigned kMost = 1024;
  unsigned members;
  unsigned arrived = 0;
  std::uint64_t number = 0;
  std::uint64_t values[2][kMost] = {};
};

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

struct Context {
  Place place;
  std::unique_ptr<char[]> stack;
  const Meeting* meeting = nullptr;  // that it waits for the end of
  std::uint64_t number = 0;
  bool started = false;
  bool ended = false;
  void* fiber = nullptr;  // its name at the sanitizer
};

// No containers: their members would not be hidden.
struct BlockRun {
  BlockRun(unsigned count, const std::function<void()>* body)
      : threads(count), kernel(body), contexts(new Context[count]), block(count) {}
  unsigned threads;
  const std::function<void()>* kernel;
  Place scheduler;
  void* scheduler_fiber = __tsan_get_current_fiber();
  std::unique_ptr<Context[]> contexts;
  Meeting block;
  Meeting warps[Meeting::kMost / 32];
};

thread_local BlockRun* running = nullptr;

UNIEP_HIDDEN void switch_out() {
  Context& self = running->contexts.get()[thread_index.x];
  __tsan_switch_to_fiber(running->scheduler_fiber, 1);
  switch_places(self.place, running->scheduler, true);
}

UNIEP_HIDDEN void context_main() {
  (*running->kernel)();
  __tsan_release(running);
  running->contexts.get()[thread_index.x].ended = true;
  switch_out();
}

UNIEP_HIDDEN const std::uint64_t* gather(Meeting& meeting, unsigned member, std::uint64_t value) {
  const std::uint64_t number = meeting.number;
  meeting.values[number % 2][member] = value;
  __tsan_release(&meeting);
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.number;
  } else {
    Context& self = running->contexts.get()[thread_index.x];
    self.meeting = &meeting;
    self.number = number;
    switch_out();
    self.meeting = nullptr;
  }
  __tsan_acquire(&meeting);
  return meeting.values[number % 2];
}

void start_contexts(BlockRun& run) {
  for (unsigned thread = 0; thread < run.threads; ++thread) {
    Context& context = run.contexts[thread];
    context.stack = stacks().take();
    context.fiber = __tsan_create_fiber(0);
    ucontext_t& state = context.place.state;
    getcontext(&state);
    state.uc_stack.ss_sp = context.stack.get();
    state.uc_stack.ss_size = kStackBytes;
    makecontext(&state, context_main, 0);
  }
}

// One turn for each CUDA thread that can go on; true when all have ended.
UNIEP_HIDDEN bool take_turns(BlockRun& run, Context* contexts) {
  unsigned ended = 0;
  for (unsigned thread = 0; thread < run.threads; ++thread) {
    Context& context = contexts[thread];
    if (context.ended) ++ended;
    const bool waits = context.meeting != nullptr && context.meeting->number == context.number;
    if (context.ended || waits) continue;
    thread_index.x = thread;
    __tsan_switch_to_fiber(context.fiber, context.started ? 1 : 0);
    const bool started = std::exchange(context.started, true);
    switch_places(run.scheduler, context.place, started);
  }
  return ended == run.threads;
}

void run_block(unsigned index, unsigned threads, const std::function<void()>& kernel) {
  BlockRun run(threads, &kernel);
  running = &run;
  block_index.x = index;
  start_contexts(run);
  while (!take_turns(run, run.contexts.get())) std::this_thread::yield();
  for (unsigned thread = 0; thread < threads; ++thread) {
    __tsan_acquire(&run);
    __tsan_destroy_fiber(run.contexts[thread].fiber);
    stacks().give(std::move(run.contexts[thread].stack));
  }
  running = nullptr;
}

}  // namespace

UNIEP_HIDDEN void pause() { switch_out(); }

UNIEP_HIDDEN const std::uint64_t* gather_block(std::uint64_t value) {
  return gather(running->block, thread_index.x, value);
}
UNIEP_HIDDEN const std::uint64_t* gather_warp(std::uint64_t value) {
  return gather(running->warps[thread_index.x / 32], thread_index.x % 32, value);
}

void run_blocks(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<std::jthread> list;
  for (unsigned block = 0; block < blocks; ++block) {
    list.emplace_back([=, &kernel] { run_block(block, threads, kernel); });
  }
}

}  // namespace uniep::emulation

UNIEP_HIDDEN int __syncthreads_or(int predicate) {
  using namespace uniep::emulation;
  const std::uint64_t* values = gather_block(predicate != 0 ? 1 : 0);
  std::uint64_t any = 0;
  for (unsigned thread = 0; thread < running->threads; ++thread) any |= values[thread];
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
