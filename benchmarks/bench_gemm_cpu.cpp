// SPDX-License-Identifier: Apache-2.0
// The grouped product of the CPU layer in f32 and bf16, tile by tile as its workers run it, with
// every instruction set of this machine, against oneDNN on one dense f32 product of the same size.
// All use the same number of threads.
#include <atomic>
#include <thread>

#include "cpu/gemm.hpp"
#include "timing.hpp"

#if UNIEP_HAS_ONEDNN
#include <dnnl.h>
#endif

namespace {

using uniep::bench::Candidate;

struct Problem {
  std::int64_t groups, rows, n, k;  // `rows` rows in each group
  std::int64_t tile_m, tile_n;
  int threads;
};

// c [groups * rows, n] = a [groups * rows, k] · b[group]ᵀ, b [groups, n, k].
template <typename S>
void run_grouped(const Problem& p, const S* a, const S* b, float* c,
                 std::vector<uniep::cpu::GemmScratch>& scratch, uniep::cpu::InstructionSet set) {
  const std::int64_t down = (p.rows + p.tile_m - 1) / p.tile_m;
  const std::int64_t across = (p.n + p.tile_n - 1) / p.tile_n;
  std::atomic<std::int64_t> ticket = 0;
  const auto work = [&](int worker) {
    while (true) {
      const std::int64_t tile = ticket.fetch_add(1, std::memory_order_relaxed);
      if (tile >= p.groups * down * across) return;
      const std::int64_t group = tile / (down * across);
      const std::int64_t i = tile / across % down * p.tile_m;
      const std::int64_t j = tile % across * p.tile_n;
      const std::int64_t row = group * p.rows + i;
      uniep::cpu::gemm_tile(uniep::cpu::MatrixView<S>{a + row * p.k, p.k, 1},
                            uniep::cpu::MatrixView<S>{b + (group * p.n + j) * p.k, 1, p.k},
                            std::min(p.tile_m, p.rows - i), std::min(p.tile_n, p.n - j), p.k,
                            c + row * p.n + j, p.n, scratch[static_cast<std::size_t>(worker)], set);
    }
  };
  std::vector<std::jthread> workers;
  for (int worker = 1; worker < p.threads; ++worker) workers.emplace_back(work, worker);
  work(0);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace uniep::bench;
  const Problem p{.groups = flag_value(argc, argv, "--groups", 8),
                  .rows = flag_value(argc, argv, "--rows", 256),
                  .n = flag_value(argc, argv, "--n", 1024),
                  .k = flag_value(argc, argv, "--k", 1024),
                  .tile_m = flag_value(argc, argv, "--tile-m", 64),
                  .tile_n = flag_value(argc, argv, "--tile-n", 128),
                  .threads = static_cast<int>(flag_value(argc, argv, "--threads", 2))};
  const auto repeats = static_cast<int>(flag_value(argc, argv, "--repeats", 15));
  const auto count = [](std::int64_t value) { return static_cast<std::size_t>(value); };
  const std::int64_t m = p.groups * p.rows;
  const auto a = random_floats(count(m * p.k), 1);
  const auto b = random_floats(count(p.groups * p.n * p.k), 2);
  std::vector<float> c(count(m * p.n));
  std::vector<uniep::cpu::GemmScratch> scratch(count(p.threads));

  std::vector<Candidate> candidates;
  const auto narrow = [](const std::vector<float>& values) {
    std::vector<uniep::Bf16> result;
    for (const float value : values) result.push_back(uniep::to_bf16(value));
    return result;
  };
  const auto a16 = narrow(a);
  const auto b16 = narrow(b);
  const auto best = uniep::cpu::best_instruction_set();
  candidates.push_back({"f32, " + to_string(best),
                        [&] { run_grouped(p, a.data(), b.data(), c.data(), scratch, best); },
                        {}});
  candidates.push_back({"bf16, " + to_string(best),
                        [&] { run_grouped(p, a16.data(), b16.data(), c.data(), scratch, best); },
                        {}});
  for (const auto set : uniep::cpu::instruction_sets()) {
    if (set == best || set == uniep::cpu::InstructionSet::generic) continue;
    candidates.push_back({"f32, " + to_string(set),
                          [&, set] { run_grouped(p, a.data(), b.data(), c.data(), scratch, set); },
                          {}});
  }
#if UNIEP_HAS_ONEDNN
  // Read by OpenMP when it starts its threads, at oneDNN's first call.
  ::setenv("OMP_NUM_THREADS", std::to_string(p.threads).c_str(), 1);
  std::vector<float> dense(c.size());
  candidates.push_back({"f32, one product, oneDNN",
                        [&] {
                          dnnl_sgemm('N', 'T', m, p.n, p.k, 1.0F, a.data(), p.k, b.data(), p.k,
                                     0.0F, dense.data(), p.n);
                        },
                        {}});
#endif
  interleave(candidates, repeats);
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  fmt::print("{} groups of {} rows, n {}, k {}, tiles {} x {}, {} threads, {} rounds\n", p.groups,
             p.rows, p.n, p.k, p.tile_m, p.tile_n, p.threads, repeats);
  print_header();
  for (const Candidate& candidate : candidates) print_row(candidate);
  for (const Candidate& candidate : candidates) {
    fmt::print("{:<28} {:>10.2f} GFLOP/s\n", candidate.name, flops / median(candidate) / 1e6);
  }
  fmt::print("bf16 against f32             {:>9.1f} %   (target: at least 50 %)\n",
             100.0 * median(candidates[0]) / median(candidates[1]));
#if UNIEP_HAS_ONEDNN
  fmt::print("f32 against oneDNN           {:>9.1f} %   (target: at least 75 %)\n",
             100.0 * median(candidates.back()) / median(candidates[0]));
#endif
  return 0;
}
