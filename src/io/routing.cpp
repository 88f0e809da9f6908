// SPDX-License-Identifier: Apache-2.0
// Every routing is a chooser: a function that fills one token's choices, called for token after
// token. Shares such as "80 %" are kept by counting, not by coin flips, so they hold for small
// batches too.
#include "io/routing.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "base/error.hpp"
#include "base/rng.hpp"

namespace uniep {
namespace {

constexpr double kMaxZipfExponent = 16;
constexpr int kBurstPeriod = 4;

// Streams of one seed and call: masking must not disturb the ids, nor ids the weights.
enum class Stream : std::uint64_t { ids, weights, mask, tokens, popularity };
constexpr std::uint64_t kNumStreams = 8;

Rng make_rng(std::uint64_t seed, int call, Stream stream) {
  return Rng(seed,
             static_cast<std::uint64_t>(call) * kNumStreams + static_cast<std::uint64_t>(stream));
}

using Pool = std::vector<std::int32_t>;
using Choices = std::span<std::int32_t>;
using Chosen = std::span<const std::int32_t>;
using Chooser = std::function<void(Rng&, Choices)>;

struct Problem {
  int num_ranks;
  int num_experts;
  int topk;
  std::uint64_t seed;
  int call;

  [[nodiscard]] bool is_distinct() const { return topk <= num_experts; }
  // Ranks below this one own at least one expert.
  [[nodiscard]] int num_owners() const { return std::min(num_ranks, num_experts); }
  [[nodiscard]] int pick_owner(int shift) const {
    const auto owners = static_cast<std::uint64_t>(num_owners());
    return static_cast<int>((seed % owners + static_cast<std::uint64_t>(shift)) % owners);
  }
  // What a choice must differ from: the token's earlier choices, or nothing where topk > E.
  [[nodiscard]] Chosen taken(Choices choices, std::size_t choice) const {
    return is_distinct() ? Chosen(choices).first(choice) : Chosen();
  }
};

bool contains(Chosen chosen, std::int32_t expert) {
  return std::find(chosen.begin(), chosen.end(), expert) != chosen.end();
}

// A uniformly random expert of the pool outside `chosen`, or nothing where none is left.
std::optional<std::int32_t> pick(Rng& rng, std::span<const std::int32_t> pool, Chosen chosen) {
  if (pool.empty()) return std::nullopt;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const std::int32_t expert = pool[rng.below(pool.size())];
    if (!contains(chosen, expert)) return expert;
  }
  Pool rest;
  for (const std::int32_t expert : pool) {
    if (!contains(chosen, expert)) rest.push_back(expert);
  }
  if (rest.empty()) return std::nullopt;
  return rest[rng.below(rest.size())];
}

// Experts of each rank, [num_ranks][experts of the rank].
std::vector<Pool> pools_by_rank(const Problem& problem) {
  std::vector<Pool> pools;
  std::int32_t expert = 0;
  for (const std::int64_t count : split_evenly(problem.num_experts, problem.num_ranks)) {
    Pool& pool = pools.emplace_back(static_cast<std::size_t>(count));
    std::iota(pool.begin(), pool.end(), expert);
    expert += static_cast<std::int32_t>(count);
  }
  return pools;
}

Pool all_experts(const Problem& problem) {
  Pool pool(static_cast<std::size_t>(problem.num_experts));
  std::iota(pool.begin(), pool.end(), 0);
  return pool;
}

// Experts of the ranks for which `keep` holds.
template <typename Keep>
Pool experts_of_ranks(const Problem& problem, Keep keep) {
  Pool kept;
  const auto pools = pools_by_rank(problem);
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    const Pool& pool = pools[static_cast<std::size_t>(rank)];
    if (keep(rank)) kept.insert(kept.end(), pool.begin(), pool.end());
  }
  return kept;
}

Chooser uniform_over(const Problem& problem, Pool pool) {
  return [problem, pool = std::move(pool)](Rng& rng, Choices choices) {
    for (std::size_t choice = 0; choice < choices.size(); ++choice) {
      choices[choice] = pick(rng, pool, problem.taken(choices, choice)).value_or(-1);
    }
  };
}

// Rows of a favoured set and of all, to steer towards a share of the favoured ones.
struct Share {
  std::int64_t favoured = 0;
  std::int64_t total = 0;

  [[nodiscard]] bool is_below(std::int64_t percent) const {
    return favoured * 100 < percent * (total + 1);
  }
  void count(bool is_favoured) {
    favoured += is_favoured ? 1 : 0;
    ++total;
  }
};

// The experts of `hot` (ascending) take 80 % of the choices, uniformly among themselves.
Chooser favour(const Problem& problem, Pool hot) {
  Pool cold;
  const Pool all = all_experts(problem);
  std::set_difference(all.begin(), all.end(), hot.begin(), hot.end(), std::back_inserter(cold));
  return [problem, hot = std::move(hot), cold = std::move(cold), share = Share{}](
             Rng& rng, Choices choices) mutable {
    for (std::size_t choice = 0; choice < choices.size(); ++choice) {
      const Chosen taken = problem.taken(choices, choice);
      const bool want_hot = share.is_below(80);
      auto expert = pick(rng, want_hot ? hot : cold, taken);
      const bool is_hot = want_hot == expert.has_value();
      if (!expert) expert = pick(rng, want_hot ? cold : hot, taken);
      UNIEP_ASSERT(expert.has_value());
      share.count(is_hot);
      choices[choice] = *expert;
    }
  };
}

Chooser hot_experts(const Problem& problem) {
  Pool pool = all_experts(problem);
  Rng rng = make_rng(problem.seed, 0, Stream::popularity);
  const std::size_t num_hot = (pool.size() + 9) / 10;
  for (std::size_t i = 0; i < num_hot; ++i) {
    std::swap(pool[i], pool[i + rng.below(pool.size() - i)]);
  }
  pool.resize(num_hot);
  std::sort(pool.begin(), pool.end());
  return favour(problem, std::move(pool));
}

Chooser hot_rank(const Problem& problem, int shift) {
  const int hot = problem.pick_owner(shift);
  return favour(problem, experts_of_ranks(problem, [hot](int rank) { return rank == hot; }));
}

// Ranks are drawn uniformly; within a rank the hot expert, moved to the front, takes half.
Chooser spread_hot(const Problem& problem) {
  std::vector<Pool> pools = pools_by_rank(problem);
  pools.resize(static_cast<std::size_t>(problem.num_owners()));
  for (Pool& pool : pools) std::swap(pool.front(), pool[problem.seed % pool.size()]);
  return [problem, pools = std::move(pools),
          shares = std::vector<Share>(static_cast<std::size_t>(problem.num_owners()))](
             Rng& rng, Choices choices) mutable {
    for (std::size_t choice = 0; choice < choices.size(); ++choice) {
      const Chosen taken = problem.taken(choices, choice);
      std::size_t rank = rng.below(pools.size());
      const auto is_free = [&taken](std::int32_t expert) { return !contains(taken, expert); };
      while (std::none_of(pools[rank].begin(), pools[rank].end(), is_free)) {
        rank = (rank + 1) % pools.size();  // ends: some expert is free where topk <= E
      }
      const auto pool = std::span<const std::int32_t>(pools[rank]);
      const bool want_hot = shares[rank].is_below(50);
      auto expert = pick(rng, want_hot ? pool.first(1) : pool.subspan(1), taken);
      if (!expert) expert = pick(rng, pool, taken);
      UNIEP_ASSERT(expert.has_value());
      shares[rank].count(*expert == pool.front());
      choices[choice] = *expert;
    }
  };
}

Chooser one_hot(const Problem& problem) {
  const auto num_experts = static_cast<std::uint64_t>(problem.num_experts);
  return [num_experts, expert = problem.seed % num_experts](Rng&, Choices choices) {
    for (std::size_t choice = 0; choice < choices.size(); ++choice) {
      choices[choice] = static_cast<std::int32_t>((expert + choice) % num_experts);
    }
  };
}

Chooser zipf(const Problem& problem, double exponent) {
  Pool pool = all_experts(problem);
  Rng rng = make_rng(problem.seed, 0, Stream::popularity);
  for (std::size_t i = pool.size(); i > 1; --i) std::swap(pool[i - 1], pool[rng.below(i)]);
  // Whole weights of 32 bits: the last bits of pow, which platforms differ in, do not matter.
  std::vector<std::uint64_t> ends;
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < pool.size(); ++i) {
    const double weight = std::pow(static_cast<double>(i + 1), -exponent) * 0x1p32;
    total += std::max<std::uint64_t>(1, static_cast<std::uint64_t>(weight));
    ends.push_back(total);
  }
  return [problem, pool = std::move(pool), ends = std::move(ends)](Rng& draws, Choices choices) {
    for (std::size_t choice = 0; choice < choices.size(); ++choice) {
      const Chosen taken = problem.taken(choices, choice);
      std::optional<std::int32_t> expert;
      for (int attempt = 0; attempt < 256 && !expert; ++attempt) {
        const auto end = std::upper_bound(ends.begin(), ends.end(), draws.below(ends.back()));
        const std::int32_t drawn = pool[static_cast<std::size_t>(end - ends.begin())];
        if (!contains(taken, drawn)) expert = drawn;
      }
      // All the weight lies on experts that are taken: any of the others.
      if (!expert) expert = pick(draws, pool, taken);
      UNIEP_ASSERT(expert.has_value());
      choices[choice] = *expert;
    }
  };
}

Chooser make_chooser(const RoutingSpec& spec, const Problem& problem) {
  switch (spec.kind) {
    case RoutingKind::balanced:
    case RoutingKind::ragged:
      return uniform_over(problem, all_experts(problem));
    case RoutingKind::hot_experts:
      return hot_experts(problem);
    case RoutingKind::hot_rank:
      return hot_rank(problem, 0);
    case RoutingKind::rotating_hot:
      return hot_rank(problem, problem.call);
    case RoutingKind::spread_hot:
      return spread_hot(problem);
    case RoutingKind::zero_expert_rank: {
      const int starved = problem.pick_owner(0);
      return uniform_over(
          problem, experts_of_ranks(problem, [starved](int rank) { return rank != starved; }));
    }
    case RoutingKind::burst:
      if (problem.call % kBurstPeriod == kBurstPeriod - 1) return one_hot(problem);
      return uniform_over(problem, all_experts(problem));
    case RoutingKind::zipf:
      return zipf(problem, spec.zipf_exponent);
    case RoutingKind::one_hot:
      return one_hot(problem);
    case RoutingKind::empty_ranks:
      return uniform_over(problem,
                          experts_of_ranks(problem, [](int rank) { return rank % 2 == 0; }));
    case RoutingKind::file:
      break;
  }
  UNIEP_ASSERT(false && "a routing without a chooser");
  return {};
}

void check_arguments(const RoutingSpec& spec, const Problem& problem, std::int64_t global_tokens,
                     double mask) {
  if (problem.num_ranks < 1 || problem.num_ranks > kMaxRanks) {
    throw_invalid("the number of ranks is {}; it must be 1 to {}", problem.num_ranks, kMaxRanks);
  }
  if (problem.num_experts < 1) {
    throw_invalid("the number of experts is {}; it must be at least 1", problem.num_experts);
  }
  if (problem.topk < 1 || problem.topk > kMaxTopk) {
    throw_invalid("topk is {}; it must be 1 to {}", problem.topk, kMaxTopk);
  }
  constexpr std::int64_t kMaxTokens = std::int64_t{1}
                                      << 40;  // products with topk stay far from 2^63
  if (global_tokens < 0 || global_tokens > kMaxTokens) {
    throw_invalid("the number of tokens is {}; it must be 0 to {}", global_tokens, kMaxTokens);
  }
  if (!(mask >= 0 && mask <= 1)) {
    throw_invalid("the mask probability is {}; it must be 0 to 1", mask);
  }
  if (problem.call < 0) throw_invalid("the call number is {}; it must be at least 0", problem.call);

  const bool starves_experts =
      spec.kind == RoutingKind::zero_expert_rank || spec.kind == RoutingKind::empty_ranks;
  if (starves_experts && problem.num_owners() < 2) {
    throw_invalid(
        "routing '{}' starves a rank that owns experts, so it needs at least 2 ranks and "
        "2 experts; it was given {} and {}",
        spec.name, problem.num_ranks, problem.num_experts);
  }
  if (spec.kind == RoutingKind::ragged && problem.num_ranks < 2) {
    throw_invalid(
        "routing '{}' leaves one rank without tokens, so it needs at least 2 ranks; it "
        "was given 1",
        spec.name);
  }
}

// Shares in the ratio 1 : 2 : … : R - 1, shuffled over the ranks other than seed mod R.
std::vector<std::int64_t> ragged_split(const Problem& problem, std::int64_t total) {
  const auto num_ranks = static_cast<std::size_t>(problem.num_ranks);
  std::vector<std::int64_t> parts(num_ranks, 0);
  const std::size_t empty = problem.seed % num_ranks;
  std::vector<std::size_t> ranks;
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (rank != empty) ranks.push_back(rank);
  }
  Rng rng = make_rng(problem.seed, problem.call, Stream::tokens);
  for (std::size_t i = ranks.size(); i > 1; --i) std::swap(ranks[i - 1], ranks[rng.below(i)]);

  const auto num_parts = static_cast<std::int64_t>(ranks.size());
  const std::int64_t unit = num_parts * (num_parts + 1) / 2;
  std::int64_t left = total;
  for (std::int64_t i = num_parts; i >= 1; --i) {
    const std::int64_t part = total / unit * i + total % unit * i / unit;
    parts[ranks[static_cast<std::size_t>(i - 1)]] = part;
    left -= part;
  }
  parts[ranks.back()] += left;  // what rounding left over goes to the largest
  return parts;
}

// Like a softmax's output: positive, and a token's weights add up to 1 but for rounding.
std::vector<float> make_weights(const Problem& problem, std::size_t num_tokens) {
  const auto topk = static_cast<std::size_t>(problem.topk);
  std::vector<float> weights(num_tokens * topk);
  Rng rng = make_rng(problem.seed, problem.call, Stream::weights);
  for (std::size_t token = 0; token < num_tokens; ++token) {
    const auto row = std::span(weights).subspan(token * topk, topk);
    float sum = 0;
    for (float& weight : row) {
      weight = static_cast<float>((rng.next() >> 44) + 0x10000U) * 0x1p-20F;
      sum += weight;
    }
    for (float& weight : row) weight /= sum;
  }
  return weights;
}

void check_file_shape(const RoutingSpec& spec, std::string_view name, const Tensor& tensor,
                      std::int64_t global_tokens, int topk) {
  if (tensor.shape != std::vector<std::int64_t>{global_tokens, topk}) {
    throw_invalid(
        "tensor {} of routing file {} has the shape {}, but {} tokens with topk {} need "
        "[{}, {}]",
        name, quote(spec.path), shape_text(tensor.shape), global_tokens, topk, global_tokens, topk);
  }
}

void read_routing_file(const RoutingSpec& spec, const Problem& problem, std::int64_t global_tokens,
                       Routing& routing) {
  const TensorFile file = read_tensor_file(spec.path);
  const auto ids = file.tensors.find("topk_ids");
  if (ids == file.tensors.end()) {
    throw_invalid("routing file {} has no tensor topk_ids", quote(spec.path));
  }
  check_file_shape(spec, "topk_ids", ids->second, global_tokens, problem.topk);
  routing.topk_ids = read_topk_ids(ids->second, problem.num_experts, spec.path);

  const auto weights = file.tensors.find("topk_weights");
  if (weights == file.tensors.end()) return;
  check_file_shape(spec, "topk_weights", weights->second, global_tokens, problem.topk);
  if (weights->second.dtype != DType::f32) {
    throw_invalid("tensor topk_weights of routing file {} is {}; it must be F32", quote(spec.path),
                  dtype_name(weights->second.dtype));
  }
  routing.topk_weights = tensor_values<float>(weights->second);
}

void mask_choices(const Problem& problem, double mask, std::vector<std::int32_t>& topk_ids) {
  if (mask == 0) return;
  Rng rng = make_rng(problem.seed, problem.call, Stream::mask);
  for (std::int32_t& expert : topk_ids) {
    if (rng.uniform01() < mask) expert = -1;
  }
}

double parse_zipf_exponent(std::string_view text) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= 0 && value <= kMaxZipfExponent)) {
    throw_invalid(
        "routing zipf:{} needs a number from 0 to {} after the colon, for example zipf:1.2", text,
        kMaxZipfExponent);
  }
  return value;
}

}  // namespace

RoutingSpec parse_routing(std::string_view text) {
  static constexpr std::pair<std::string_view, RoutingKind> kNames[] = {
      {"W0", RoutingKind::balanced},
      {"W1", RoutingKind::hot_experts},
      {"W2", RoutingKind::hot_rank},
      {"W3", RoutingKind::spread_hot},
      {"W4", RoutingKind::ragged},
      {"W5", RoutingKind::zero_expert_rank},
      {"W6", RoutingKind::rotating_hot},
      {"W7", RoutingKind::burst},
      {"uniform", RoutingKind::balanced},
      {"one-hot", RoutingKind::one_hot},
      {"empty-ranks", RoutingKind::empty_ranks},
  };
  RoutingSpec spec;
  spec.name = text;
  for (const auto& [name, kind] : kNames) {
    if (text != name) continue;
    spec.kind = kind;
    return spec;
  }
  constexpr std::string_view kZipf = "zipf:";
  constexpr std::string_view kFile = "file:";
  if (text.starts_with(kZipf)) {
    spec.kind = RoutingKind::zipf;
    spec.zipf_exponent = parse_zipf_exponent(text.substr(kZipf.size()));
    return spec;
  }
  if (text.starts_with(kFile) && text.size() > kFile.size()) {
    spec.kind = RoutingKind::file;
    spec.path = text.substr(kFile.size());
    return spec;
  }
  throw_invalid(
      "routing {} is unknown; valid are W0 to W7, uniform, zipf:S, one-hot, empty-ranks "
      "and file:PATH",
      quote(text));
}

Routing make_routing(const RoutingSpec& spec, int num_ranks, std::int64_t global_tokens,
                     int num_experts, int topk, double mask, std::uint64_t seed, int call) {
  const Problem problem{num_ranks, num_experts, topk, seed, call};
  check_arguments(spec, problem, global_tokens, mask);
  const auto num_tokens = static_cast<std::size_t>(global_tokens);
  const auto num_choices = static_cast<std::size_t>(topk);

  Routing routing;
  routing.tokens_per_rank = spec.kind == RoutingKind::ragged
                                ? ragged_split(problem, global_tokens)
                                : split_evenly(global_tokens, num_ranks);
  if (spec.kind == RoutingKind::file) {
    read_routing_file(spec, problem, global_tokens, routing);
  } else {
    const Chooser choose = make_chooser(spec, problem);
    Rng rng = make_rng(seed, call, Stream::ids);
    routing.topk_ids.resize(num_tokens * num_choices);
    for (std::size_t token = 0; token < num_tokens; ++token) {
      choose(rng, Choices(routing.topk_ids).subspan(token * num_choices, num_choices));
    }
  }
  mask_choices(problem, mask, routing.topk_ids);
  const bool has_weights = num_tokens == 0 || !routing.topk_weights.empty();
  if (!has_weights) routing.topk_weights = make_weights(problem, num_tokens);
  return routing;
}

std::vector<std::int64_t> split_evenly(std::int64_t total, int num_ranks) {
  UNIEP_ASSERT(total >= 0 && num_ranks >= 1);
  std::vector<std::int64_t> parts(static_cast<std::size_t>(num_ranks), total / num_ranks);
  for (std::int64_t rank = 0; rank < total % num_ranks; ++rank) {
    ++parts[static_cast<std::size_t>(rank)];
  }
  return parts;
}

std::vector<std::int32_t> read_topk_ids(const Tensor& tensor, std::int64_t num_experts,
                                        const std::string& path) {
  if (tensor.shape.size() != 2) {
    throw_invalid("tensor topk_ids of file {} has the shape {}; it must be [tokens, topk]",
                  quote(path), shape_text(tensor.shape));
  }
  std::vector<std::int64_t> values;
  if (tensor.dtype == DType::i64) {
    values = tensor_values<std::int64_t>(tensor);
  } else if (tensor.dtype == DType::i32) {
    const auto narrow = tensor_values<std::int32_t>(tensor);
    values.assign(narrow.begin(), narrow.end());
  } else {
    throw_invalid("tensor topk_ids of file {} is {}; it must be I32 or I64", quote(path),
                  dtype_name(tensor.dtype));
  }
  std::vector<std::int32_t> topk_ids;
  topk_ids.reserve(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] < -1 || values[i] >= num_experts) {
      const auto topk = static_cast<std::size_t>(tensor.shape[1]);
      throw_invalid(
          "tensor topk_ids of file {} has the value {} at token {}, choice {}; it must be "
          "-1 (masked) or an expert from 0 to {}",
          quote(path), values[i], i / topk, i % topk, num_experts - 1);
    }
    topk_ids.push_back(static_cast<std::int32_t>(values[i]));
  }
  return topk_ids;
}

}  // namespace uniep
