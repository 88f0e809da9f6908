// SPDX-License-Identifier: Apache-2.0
#include <ucontext.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

namespace uniep::emulation {

thread_local dim3 thread_index;
thread_local dim3 block_index;

namespace {

constexpr std::size_t kStackBytes = 64 << 10;

// Members meet, each with a value. Two sets of values, since a slow member may still read those of
// one meeting while the next gathers.
struct Meeting {
  explicit Meeting(unsigned size) : members(size), values{Values(size), Values(size)} {}
  using Values = std::vector<std::uint64_t>;
  unsigned members;
  unsigned arrived = 0;
  std::uint64_t number = 0;
  std::array<Values, 2> values;
};

struct Context {
  ucontext_t state{};
  std::unique_ptr<char[]> stack;
  const Meeting* meeting = nullptr;  // that it waits for the end of
  std::uint64_t number = 0;
  bool ended = false;
};

struct BlockRun {
  BlockRun(unsigned threads, const std::function<void()>& body)
      : kernel(body), contexts(threads), block(threads), warps(threads / 32, Meeting(32)) {}
  const std::function<void()>& kernel;
  ucontext_t scheduler{};
  std::vector<Context> contexts;
  Meeting block;
  std::vector<Meeting> warps;
};

thread_local BlockRun* running = nullptr;

void switch_out() {
  Context& self = running->contexts[thread_index.x];
  swapcontext(&self.state, &running->scheduler);
}

void context_main() {
  running->kernel();
  running->contexts[thread_index.x].ended = true;
  switch_out();
}

const std::uint64_t* gather(Meeting& meeting, unsigned member, std::uint64_t value) {
  const std::uint64_t number = meeting.number;
  auto& values = meeting.values[number % 2];
  values[member] = value;
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.number;
  } else {
    Context& self = running->contexts[thread_index.x];
    self.meeting = &meeting;
    self.number = number;
    switch_out();
    self.meeting = nullptr;
  }
  return values.data();
}

void run_block(unsigned index, unsigned threads, const std::function<void()>& kernel) {
  BlockRun run(threads, kernel);
  running = &run;
  block_index.x = index;
  for (Context& context : run.contexts) {
    context.stack = std::unique_ptr<char[]>(new char[kStackBytes]);
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = context.stack.get();
    context.state.uc_stack.ss_size = kStackBytes;
    makecontext(&context.state, context_main, 0);
  }
  for (unsigned ended = 0; ended < threads;) {
    ended = 0;
    for (unsigned thread = 0; thread < threads; ++thread) {
      Context& context = run.contexts[thread];
      if (context.ended) {
        ++ended;
        continue;
      }
      if (context.meeting != nullptr && context.meeting->number == context.number) continue;
      thread_index.x = thread;
      swapcontext(&run.scheduler, &context.state);
    }
    std::this_thread::yield();
  }
  running = nullptr;
}

}  // namespace

void pause() { switch_out(); }

const std::uint64_t* gather_block(std::uint64_t value) {
  return gather(running->block, thread_index.x, value);
}
const std::uint64_t* gather_warp(std::uint64_t value) {
  return gather(running->warps[thread_index.x / 32], thread_index.x % 32, value);
}

void run_blocks(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<std::jthread> list;
  for (unsigned block = 0; block < blocks; ++block) {
    list.emplace_back([=, &kernel] { run_block(block, threads, kernel); });
  }
}

}  // namespace uniep::emulation

int __syncthreads_or(int predicate) {
  using namespace uniep::emulation;
  const std::uint64_t* values = gather_block(predicate != 0 ? 1 : 0);
  std::uint64_t any = 0;
  for (unsigned thread = 0; thread < running->contexts.size(); ++thread) any |= values[thread];
  return static_cast<int>(any);
}

std::uint32_t __match_any_sync(std::uint32_t, std::int32_t value) {
  const auto word = static_cast<std::uint64_t>(value);
  const std::uint64_t* values = uniep::emulation::gather_warp(word);
  std::uint32_t same = 0;
  for (unsigned lane = 0; lane < 32; ++lane) same |= values[lane] == word ? 1U << lane : 0;
  return same;
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
