// SPDX-License-Identifier: Apache-2.0
// Sample routings: which experts each token chooses, with which weights, and how the tokens are
// spread over ranks. The same arguments give the same routing on every machine; balanced, W1, zipf
// and one-hot do not depend on the number of ranks at all.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/limits.hpp"
#include "io/tensor_file.hpp"

namespace uniep {

// "The rank" and "the expert" of a skewed routing are seed mod the ranks that own experts and seed
// mod the experts, so that a caller can reach each of them. A share that a token's distinct choices
// cannot reach is approached as far as they allow.
enum class RoutingKind {
  balanced,          // W0, uniform: distinct experts, uniformly random
  hot_experts,       // W1: a tenth of the experts (rounded up) takes 80 % of the choices
  hot_rank,          // W2: one rank's experts take 80 %
  spread_hot,        // W3: one hot expert on each rank takes half of that rank's rows
  ragged,            // W4: balanced, but tokens per rank are uneven and rank seed mod R has none
  zero_expert_rank,  // W5: one rank's experts get nothing; surplus choices are masked
  rotating_hot,      // W6: W2, and the rank moves up by one with every call
  burst,             // W7: balanced, but every fourth call (3, 7, …) is one_hot
  zipf,              // zipf:S: weight i^-S for the i-th most popular expert, popularity shuffled
  one_hot,           // every token chooses the expert and the topk - 1 that follow it, cyclically
  empty_ranks,       // ranks 1, 3, 5, … get nothing; surplus choices are masked
  file,              // file:PATH: topk_ids and perhaps topk_weights of a tensor file
};

struct RoutingSpec {
  RoutingKind kind = RoutingKind::balanced;
  std::string name = "uniform";  // as given to parse_routing
  double zipf_exponent = 0;      // zipf only
  std::string path;              // file only
  bool operator==(const RoutingSpec&) const = default;
};

struct Routing {
  std::vector<std::int64_t> tokens_per_rank;  // [num_ranks]
  std::vector<std::int32_t> topk_ids;         // [global_tokens, topk], rank-major; -1 = masked
  std::vector<float> topk_weights;            // [global_tokens, topk], positive, a token's sum is 1
};

// The names that --routing takes. Anything else throws invalid_argument, which lists them.
[[nodiscard]] RoutingSpec parse_routing(std::string_view text);

// Choices of a token are distinct where topk <= num_experts. Each is masked with probability
// `mask`, keeping its weight. `call` counts the operations of a run, from 0, and varies the draws.
// Throws invalid_argument for sizes out of range, for a routing that the rank count does not allow
// (W4, W5 and empty-ranks need two ranks), and for a file that does not fit the sizes.
[[nodiscard]] Routing make_routing(const RoutingSpec& spec, int num_ranks,
                                   std::int64_t global_tokens, int num_experts, int topk,
                                   double mask, std::uint64_t seed, int call);

// `total` things in contiguous runs, the first total mod num_ranks runs one longer: how experts,
// and by default tokens, belong to ranks.
[[nodiscard]] std::vector<std::int64_t> split_evenly(std::int64_t total, int num_ranks);

// topk_ids of a tensor file, I32 or I64 of shape [T, topk], each -1 or below num_experts. `path`
// is for the error text, which names token, choice and value.
[[nodiscard]] std::vector<std::int32_t> read_topk_ids(const Tensor& tensor,
                                                      std::int64_t num_experts,
                                                      const std::string& path);

}  // namespace uniep
