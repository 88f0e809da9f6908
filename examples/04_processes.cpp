// SPDX-License-Identifier: Apache-2.0
// A rank a process, as a training program has it: run this under torchrun or mpirun, for example
//   mpirun -n 4 ./04_processes
// Each process makes the same group, named by the launcher, and a layer of its own rank. Every rank
// prints a sum over its outputs; their total is the same for any number of ranks.
#include <cstdio>
#include <exception>
#include <uniep/job.hpp>
#include <uniep/layer.hpp>
#include <vector>

namespace {

constexpr int kExperts = 5;
constexpr std::int64_t kHidden = 16;
constexpr std::int64_t kFfn = 8;
constexpr std::int64_t kTokens = 60;  // over all ranks

std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

// Any function of the place in the global tensor, so that ranks need not exchange anything.
std::vector<float> values(std::int64_t first, std::int64_t length) {
  std::vector<float> result(count(length));
  for (std::int64_t i = 0; i < length; ++i) {
    result[count(i)] = static_cast<float>((first + i) * 37 % 61 - 30) / 64.0F;
  }
  return result;
}

void run(const uniep::Job& job) {
  uniep::GroupOptions options;
  options.num_ranks = job.num_ranks;
  options.num_experts = kExperts;
  options.topk = 1;
  options.hidden = kHidden;
  options.ffn = kFfn;
  options.max_tokens_per_rank = kTokens;
  options.dtype = uniep::DType::f32;
  options.job = job;
  uniep::Group group(options);
  uniep::Layer layer(group, job.rank);

  const std::int64_t first = kTokens * job.rank / job.num_ranks;
  const std::int64_t tokens = kTokens * (job.rank + 1) / job.num_ranks - first;
  std::vector<std::int32_t> topk_ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    topk_ids.push_back(static_cast<std::int32_t>((first + t) % kExperts));
  }
  const std::vector<float> topk_weights(count(tokens), 1.0F);
  const auto x = values(first * kHidden, tokens * kHidden);
  std::vector<float> w1, w2;
  for (const std::int32_t expert : group.experts_of(job.rank)) {
    const auto up = values(expert * 2 * kFfn * kHidden, 2 * kFfn * kHidden);
    const auto down = values(expert * kHidden * kFfn, kHidden * kFfn);
    w1.insert(w1.end(), up.begin(), up.end());
    w2.insert(w2.end(), down.begin(), down.end());
  }
  std::vector<float> out(x.size());
  static_cast<void>(layer.forward({.x = std::as_bytes(std::span(x)),
                                   .topk_ids = topk_ids,
                                   .topk_weights = topk_weights,
                                   .w1 = std::as_bytes(std::span(w1)),
                                   .w2 = std::as_bytes(std::span(w2)),
                                   .out = std::as_writable_bytes(std::span(out))}));
  double sum = 0;  // of floats small enough that f64 adds them exactly
  for (const float value : out) sum += value;
  std::printf("rank %d of %d: %lld tokens, sum %.17g\n", job.rank, job.num_ranks,
              static_cast<long long>(tokens), sum);
}

}  // namespace

int main() {
  try {
    // Without a launcher: the only rank of a job of its own.
    run(uniep::job_from_environment().value_or(uniep::Job{"04_processes", 0, 1}));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "04_processes: %s\n", error.what());
    return 3;
  }
}
