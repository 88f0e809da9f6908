// SPDX-License-Identifier: Apache-2.0
#include "cpu/rank_layer.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/error.hpp"
#include "cpu/mover.hpp"
#include "memory/signal.hpp"

namespace uniep::cpu {
namespace {

std::int64_t div_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void check_span(const char* name, std::size_t have, std::int64_t want) {
  if (static_cast<std::int64_t>(have) != want) {
    throw_invalid("{} has {} elements; this rank's shape needs {}", name, have, want);
  }
}

// What an arithmetic worker owns.
struct Scratch {
  GemmScratch gemm;
  std::vector<float> c;
  float* tile(std::int64_t elements) {
    if (static_cast<std::int64_t>(c.size()) < elements) c.resize(size(elements));
    return c.data();
  }
};

std::uint64_t count_up(std::uint64_t& word) {
  return std::atomic_ref<std::uint64_t>(word).fetch_add(1, std::memory_order_acq_rel) + 1;
}

std::int64_t flops(std::int64_t m, std::int64_t n, std::int64_t k) { return 2 * m * n * k; }

void append(std::vector<Task>& to, const std::vector<Task>& tasks) {
  to.insert(to.end(), tasks.begin(), tasks.end());
}

template <typename S>
class ForwardOperation {
 public:
  ForwardOperation(Group& group, int rank, std::uint64_t epoch, Saved<S>& saved,
                   const ForwardInput<S>& input)
      : schedule_(group.config().schedule),
        hidden_(group.config().shape.hidden),
        ffn_(input.ffn),
        saved_(saved),
        input_(input),
        mover_(group, rank, epoch, saved, input.x),
        gemm1_done_(mover_.tiles().size(), 0),
        activated_(mover_.tiles().size(), 0),
        a_(size(saved.plan.padded_rows() * input.ffn)),
        scratch_(size(schedule_.workers)) {}

  std::vector<Phase> phases() const {
    const auto num_tiles = static_cast<std::int32_t>(mover_.tiles().size());
    std::vector<Task> front, middle, back;
    for (std::int32_t tile = 0; tile < num_tiles; ++tile) {
      front.push_back({Role::fanout, tile, 0});
      for (std::int32_t n = 0; n < div_up(ffn_, schedule_.tile_n); ++n) {
        middle.push_back({Role::gemm1, tile, n});
      }
      for (std::int32_t n = 0; n < div_up(hidden_, schedule_.tile_n); ++n) {
        back.push_back({Role::gemm2, tile, n});
      }
    }
    if (schedule_.fusion == Fusion::split) {
      std::vector<Task> activations;
      for (std::int32_t tile = 0; tile < num_tiles; ++tile) {
        activations.push_back({Role::activation, tile, 0});
      }
      return {{{}, mover_.send_tasks()},
              {{}, mover_.pull_tasks()},
              {{}, front},
              {{}, middle},
              {{}, activations},
              {{}, back},
              {{}, mover_.reduce_tasks()}};
    }
    Phase phase;
    std::vector<Task>& moving = schedule_.comm_workers > 0 ? phase.comm : phase.compute;
    append(moving, mover_.send_tasks());
    append(moving, mover_.pull_tasks());
    // Each tile's fan-out just before its products.
    const std::size_t per_tile = num_tiles > 0 ? middle.size() / size(num_tiles) : 0;
    for (std::size_t tile = 0; tile < size(num_tiles); ++tile) {
      phase.compute.push_back(front[tile]);
      const auto first = middle.begin() + static_cast<std::ptrdiff_t>(tile * per_tile);
      phase.compute.insert(phase.compute.end(), first,
                           first + static_cast<std::ptrdiff_t>(per_tile));
    }
    append(phase.compute, back);
    append(moving, mover_.reduce_tasks());
    return {phase};
  }

  TaskWork run(const Task& task, int worker) {
    switch (task.role) {
      case Role::send:
        return {.flops = 0, .link_bytes = mover_.send(task)};
      case Role::pull:
        return {.flops = 0, .link_bytes = mover_.pull(task)};
      case Role::fanout:
        return {.flops = 0, .link_bytes = mover_.fanout(task.first, saved_.x_rows.data())};
      case Role::gemm1:
        return gemm1(task, scratch_[size(worker)]);
      case Role::activation:
        activate_tile(task.first);
        return {};
      case Role::gemm2:
        return gemm2(task, scratch_[size(worker)]);
      case Role::reduce:
        mover_.reduce(task, input_.out.data(), nullptr);
        return {};
      case Role::dgrad2:
      case Role::d_activation:
      case Role::dgrad1:
      case Role::wgrad2:
      case Role::wgrad1:
      case Role::none:
        UNIEP_ASSERT(!"a backward task in a forward operation");
    }
    return {};
  }

  void describe(const Task& task, TraceEvent& event) const { mover_.describe(task, event); }

  std::optional<Awaited> missing(const Task& task) {
    if (task.role == Role::gemm1) return mover_.missing_rows(task);
    if (task.role == Role::gemm2 && schedule_.fusion == Fusion::split) {
      return mover_.missing_word(&activated_[size(task.first)], 1, Signal::activated, task.role,
                                 task.first, -1);
    }
    if (task.role == Role::gemm2 || task.role == Role::activation) {
      return mover_.missing_word(&gemm1_done_[size(task.first)], num_ffn_tiles(),
                                 Signal::gemm1_done, task.role, task.first, -1);
    }
    return mover_.missing(task);
  }

 private:
  // h columns [n0, n0 + n) of gate and of up; fused, their a columns too.
  TaskWork gemm1(const Task& task, Scratch& scratch) {
    const RowTile& t = mover_.tiles()[size(task.first)];
    const std::int64_t n0 = std::int64_t{task.second} * schedule_.tile_n;
    const std::int64_t n = std::min<std::int64_t>(schedule_.tile_n, ffn_ - n0);
    float* c = scratch.tile(2 * t.rows * n);
    const MatrixView<S> x{saved_.x_rows.data() + t.row * hidden_, hidden_, 1};
    const S* w1 = input_.w1.data() + std::int64_t{t.local_expert} * 2 * ffn_ * hidden_;
    for (int half = 0; half < 2; ++half) {
      const MatrixView<S> w{w1 + (half * ffn_ + n0) * hidden_, 1, hidden_};
      gemm_tile(x, w, t.rows, n, hidden_, c + half * n, 2 * n, scratch.gemm);
    }
    for (std::int64_t i = 0; i < t.rows; ++i) {
      S* h = saved_.h.data() + (t.row + i) * 2 * ffn_ + n0;
      for (std::int64_t j = 0; j < n; ++j) {
        h[j] = narrow<S>(c[i * 2 * n + j]);
        h[ffn_ + j] = narrow<S>(c[i * 2 * n + n + j]);
      }
    }
    if (schedule_.fusion == Fusion::fused) activate(t, n0, n);
    // Counted up by each column tile's worker, awaited by gemm2 (or the split activation); the
    // tile's h and a columns become visible.
    count_up(gemm1_done_[size(task.first)]);
    return {.flops = flops(t.rows, 2 * n, hidden_), .link_bytes = 0};
  }

  void activate(const RowTile& t, std::int64_t n0, std::int64_t n) {
    for (std::int64_t row = t.row; row < t.row + t.rows; ++row) {
      const S* h = saved_.h.data() + row * 2 * ffn_ + n0;
      S* a = a_.data() + row * ffn_ + n0;
      const float weight = saved_.weights[size(row)];
      for (std::int64_t j = 0; j < n; ++j) a[j] = activation(h[j], h[ffn_ + j], weight);
    }
  }

  void activate_tile(std::int64_t tile) {
    activate(mover_.tiles()[size(tile)], 0, ffn_);
    // Raised by the split activation, awaited by gemm2; the tile's a becomes visible.
    raise(&activated_[size(tile)], 1);
  }

  std::uint64_t num_ffn_tiles() const {
    return static_cast<std::uint64_t>(div_up(ffn_, schedule_.tile_n));
  }

  TaskWork gemm2(const Task& task, Scratch& scratch) {
    const RowTile& t = mover_.tiles()[size(task.first)];
    const std::int64_t n0 = std::int64_t{task.second} * schedule_.tile_n;
    const std::int64_t n = std::min<std::int64_t>(schedule_.tile_n, hidden_ - n0);
    float* c = scratch.tile(t.rows * n);
    const S* w2 = input_.w2.data() + std::int64_t{t.local_expert} * hidden_ * ffn_;
    gemm_tile(MatrixView<S>{a_.data() + t.row * ffn_, ffn_, 1},
              MatrixView<S>{w2 + n0 * ffn_, 1, ffn_}, t.rows, n, ffn_, c, n, scratch.gemm);
    const std::int64_t bytes = mover_.return_columns(
        task.first, n0, n, c, n, static_cast<std::uint64_t>(div_up(hidden_, schedule_.tile_n)));
    return {.flops = flops(t.rows, n, ffn_), .link_bytes = bytes};
  }

  const Schedule& schedule_;
  std::int64_t hidden_;
  std::int64_t ffn_;
  Saved<S>& saved_;
  const ForwardInput<S>& input_;
  Mover<S> mover_;
  std::vector<std::uint64_t> gemm1_done_;  // [tiles] finished column tiles
  std::vector<std::uint64_t> activated_;   // [tiles]
  std::vector<S> a_;                       // [padded_rows, ffn]
  std::vector<Scratch> scratch_;           // [workers]
};

template <typename S>
class BackwardOperation {
 public:
  BackwardOperation(Group& group, int rank, std::uint64_t epoch, Saved<S>& saved,
                    const BackwardInput<S>& input)
      : schedule_(group.config().schedule),
        hidden_(group.config().shape.hidden),
        ffn_(saved.ffn),
        saved_(saved),
        input_(input),
        mover_(group, rank, epoch, saved, input.d_out),
        dgrad2_done_(mover_.tiles().size(), 0),
        d_activated_(mover_.tiles().size(), 0),
        d_rows_(size(saved.plan.padded_rows() * hidden_)),
        a_(size(saved.plan.padded_rows() * ffn_)),
        d_h_(size(saved.plan.padded_rows() * 2 * ffn_)),
        partials_(size(saved.plan.padded_rows() * div_up(ffn_, kTreeBlock))),
        d_a_(schedule_.fusion == Fusion::split ? a_.size() : 0),
        scratch_(size(schedule_.workers)) {}

  std::vector<Phase> phases() const {
    const auto num_tiles = static_cast<std::int32_t>(mover_.tiles().size());
    const auto num_ffn = static_cast<std::int32_t>(div_up(ffn_, schedule_.tile_n));
    const auto num_hidden = static_cast<std::int32_t>(div_up(hidden_, schedule_.tile_n));
    std::vector<Task> fanouts, dgrad2s, d_activations, dgrad1s, mixed;
    for (std::int32_t tile = 0; tile < num_tiles; ++tile) {
      fanouts.push_back({Role::fanout, tile, 0});
      mixed.push_back(fanouts.back());
      d_activations.push_back({Role::d_activation, tile, 0});
      for (std::int32_t n = 0; n < num_ffn; ++n) {
        dgrad2s.push_back({Role::dgrad2, tile, n});
        mixed.push_back(dgrad2s.back());
      }
      for (std::int32_t n = 0; n < num_hidden; ++n) dgrad1s.push_back({Role::dgrad1, tile, n});
    }
    const std::vector<Task> wgrads = wgrad_tasks();
    if (schedule_.fusion == Fusion::split) {
      return {{{}, mover_.send_tasks()},
              {{}, mover_.pull_tasks()},
              {{}, fanouts},
              {{}, dgrad2s},
              {{}, d_activations},
              {{}, dgrad1s},
              {{}, wgrads},
              {{}, mover_.reduce_tasks()}};
    }
    Phase phase;
    std::vector<Task>& moving = schedule_.comm_workers > 0 ? phase.comm : phase.compute;
    append(moving, mover_.send_tasks());
    append(moving, mover_.pull_tasks());
    append(phase.compute, mixed);
    append(phase.compute, dgrad1s);
    if (schedule_.wgrad == WgradOrder::filling) append(phase.compute, wgrads);
    append(moving, mover_.reduce_tasks());
    if (schedule_.wgrad == WgradOrder::after) append(phase.compute, wgrads);
    return {phase};
  }

  TaskWork run(const Task& task, int worker) {
    switch (task.role) {
      case Role::send:
        return {.flops = 0, .link_bytes = mover_.send(task)};
      case Role::pull:
        return {.flops = 0, .link_bytes = mover_.pull(task)};
      case Role::fanout:
        return {.flops = 0, .link_bytes = mover_.fanout(task.first, d_rows_.data())};
      case Role::dgrad2:
        return dgrad2(task, scratch_[size(worker)]);
      case Role::d_activation:
        d_activation(task.first);
        return {};
      case Role::dgrad1:
        return dgrad1(task, scratch_[size(worker)]);
      case Role::wgrad2:
      case Role::wgrad1:
        return wgrad(task, scratch_[size(worker)]);
      case Role::reduce:
        mover_.reduce(task, input_.d_x.data(), input_.d_topk_weights.data());
        return {};
      case Role::gemm1:
      case Role::activation:
      case Role::gemm2:
      case Role::none:
        UNIEP_ASSERT(!"a forward task in a backward operation");
    }
    return {};
  }

  void describe(const Task& task, TraceEvent& event) const { mover_.describe(task, event); }

  std::optional<Awaited> missing(const Task& task) {
    const std::size_t tile = size(task.first);
    if (task.role == Role::dgrad2) return mover_.missing_rows(task);
    if (task.role == Role::d_activation) {
      return mover_.missing_word(&dgrad2_done_[tile], num_ffn_tiles(), Signal::dgrad2_done,
                                 task.role, task.first, -1);
    }
    if (task.role == Role::dgrad1) {
      return mover_.missing_word(&d_activated_[tile], 1, Signal::d_activated, task.role, task.first,
                                 -1);
    }
    if (task.role != Role::wgrad2 && task.role != Role::wgrad1) return mover_.missing(task);
    std::optional<Awaited> awaited;
    const auto [first, last] = mover_.tiles_of(task.first);
    for (std::int64_t t = first; t < last && !awaited; ++t) {
      awaited =
          mover_.missing_word(&d_activated_[size(t)], 1, Signal::d_activated, task.role, t, -1);
    }
    return awaited;
  }

 private:
  std::vector<Task> wgrad_tasks() const {
    std::vector<Task> tasks;
    const auto num_local = static_cast<std::int32_t>(saved_.plan.expert_rows.size());
    for (const Role role : {Role::wgrad2, Role::wgrad1}) {
      const std::int64_t m = role == Role::wgrad2 ? hidden_ : 2 * ffn_;
      const std::int64_t n = role == Role::wgrad2 ? ffn_ : hidden_;
      const auto count =
          static_cast<std::int32_t>(div_up(m, schedule_.tile_m) * div_up(n, schedule_.tile_n));
      for (std::int32_t local = 0; local < num_local; ++local) {
        for (std::int32_t i = 0; i < count; ++i) tasks.push_back({role, local, i});
      }
    }
    return tasks;
  }

  // d_a columns of the tile; fused, straight on to d_h, a and the terms of d_topk_weights.
  TaskWork dgrad2(const Task& task, Scratch& scratch) {
    const RowTile& t = mover_.tiles()[size(task.first)];
    const std::int64_t n0 = std::int64_t{task.second} * schedule_.tile_n;
    const std::int64_t n = std::min<std::int64_t>(schedule_.tile_n, ffn_ - n0);
    const bool fused = schedule_.fusion == Fusion::fused;
    float* c = fused ? scratch.tile(t.rows * n) : d_a_.data() + t.row * ffn_ + n0;
    const std::int64_t ldc = fused ? n : ffn_;
    const S* w2 = input_.w2.data() + std::int64_t{t.local_expert} * hidden_ * ffn_;
    gemm_tile(MatrixView<S>{d_rows_.data() + t.row * hidden_, hidden_, 1},
              MatrixView<S>{w2 + n0, ffn_, 1}, t.rows, n, hidden_, c, ldc, scratch.gemm);
    if (fused) differentiate(t, n0, n, c, ldc);
    // Counted up by each column tile's worker; fused, the last one finishes the tile's rows. A
    // split activation waits for the full count. d_h, a and partial sums (or d_a) become visible.
    const std::uint64_t done = count_up(dgrad2_done_[size(task.first)]);
    if (fused && done == num_ffn_tiles()) finish_tile(task.first);
    return {.flops = flops(t.rows, n, hidden_), .link_bytes = 0};
  }

  void d_activation(std::int64_t tile) {
    const RowTile& t = mover_.tiles()[size(tile)];
    differentiate(t, 0, ffn_, d_a_.data() + t.row * ffn_, ffn_);
    finish_tile(tile);
  }

  std::uint64_t num_ffn_tiles() const {
    return static_cast<std::uint64_t>(div_up(ffn_, schedule_.tile_n));
  }

  // Columns [n0, n0 + n), n0 a multiple of kTreeBlock.
  void differentiate(const RowTile& t, std::int64_t n0, std::int64_t n, const float* d_a,
                     std::int64_t ld) {
    const std::int64_t blocks = div_up(ffn_, kTreeBlock);
    float terms[kTreeBlock];
    for (std::int64_t i = 0; i < t.rows; ++i) {
      const std::int64_t row = t.row + i;
      const S* h = saved_.h.data() + row * 2 * ffn_ + n0;
      S* d_h = d_h_.data() + row * 2 * ffn_ + n0;
      S* a = a_.data() + row * ffn_ + n0;
      const float weight = saved_.weights[size(row)];
      for (std::int64_t j0 = 0; j0 < n; j0 += kTreeBlock) {
        const std::int64_t width = std::min(kTreeBlock, n - j0);
        for (std::int64_t j = j0; j < j0 + width; ++j) {
          const auto gradient = activation_gradient<S>(h[j], h[ffn_ + j], weight, d_a[i * ld + j]);
          d_h[j] = gradient.d_g;
          d_h[ffn_ + j] = gradient.d_u;
          a[j] = activation(h[j], h[ffn_ + j], weight);
          terms[j - j0] = gradient.d_weight;
        }
        partials_[size(row * blocks + (n0 + j0) / kTreeBlock)] =
            tree_sum<float>(std::span<const float>(terms, size(width)));
      }
    }
  }

  void finish_tile(std::int64_t tile) {
    const RowTile& t = mover_.tiles()[size(tile)];
    const std::int64_t blocks = div_up(ffn_, kTreeBlock);
    for (std::int64_t row = t.row; row < t.row + t.rows; ++row) {
      float sum = 0.0F;
      for (std::int64_t b = 0; b < blocks; ++b) sum += partials_[size(row * blocks + b)];
      mover_.return_d_weight(row, canonical(sum));
    }
    // Raised when all of the tile's d_h and a are written, awaited by dgrad1 and the weight
    // gradients; they become visible, and the d_topk_weights sent home precede any later signal.
    raise(&d_activated_[size(tile)], 1);
  }

  TaskWork dgrad1(const Task& task, Scratch& scratch) {
    const RowTile& t = mover_.tiles()[size(task.first)];
    const std::int64_t n0 = std::int64_t{task.second} * schedule_.tile_n;
    const std::int64_t n = std::min<std::int64_t>(schedule_.tile_n, hidden_ - n0);
    float* c = scratch.tile(t.rows * n);
    const S* w1 = input_.w1.data() + std::int64_t{t.local_expert} * 2 * ffn_ * hidden_;
    gemm_tile(MatrixView<S>{d_h_.data() + t.row * 2 * ffn_, 2 * ffn_, 1},
              MatrixView<S>{w1 + n0, hidden_, 1}, t.rows, n, 2 * ffn_, c, n, scratch.gemm);
    const std::int64_t bytes = mover_.return_columns(
        task.first, n0, n, c, n, static_cast<std::uint64_t>(div_up(hidden_, schedule_.tile_n)));
    return {.flops = flops(t.rows, n, 2 * ffn_), .link_bytes = bytes};
  }

  // One output tile over all of the expert's rows in buffer order.
  TaskWork wgrad(const Task& task, Scratch& scratch) {
    const bool second = task.role == Role::wgrad2;
    const std::int64_t m_total = second ? hidden_ : 2 * ffn_;
    const std::int64_t n_total = second ? ffn_ : hidden_;
    const std::int64_t columns = div_up(n_total, schedule_.tile_n);
    const std::int64_t m0 = task.second / columns * schedule_.tile_m;
    const std::int64_t n0 = task.second % columns * schedule_.tile_n;
    const std::int64_t m = std::min<std::int64_t>(schedule_.tile_m, m_total - m0);
    const std::int64_t n = std::min<std::int64_t>(schedule_.tile_n, n_total - n0);
    const std::int64_t rows = saved_.plan.expert_rows[size(task.first)];
    float* out = (second ? input_.d_w2 : input_.d_w1).data() +
                 std::int64_t{task.first} * m_total * n_total + m0 * n_total + n0;
    if (rows == 0 && input_.accumulate) return {};
    const std::int64_t start = saved_.plan.expert_starts[size(task.first)];
    const S* left = second ? d_rows_.data() + start * hidden_ : d_h_.data() + start * 2 * ffn_;
    const S* right = second ? a_.data() + start * ffn_ : saved_.x_rows.data() + start * hidden_;
    float* c = scratch.tile(m * n);
    gemm_tile(MatrixView<S>{left + m0, 1, m_total}, MatrixView<S>{right + n0, n_total, 1}, m, n,
              rows, c, n, scratch.gemm);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        float& to = out[i * n_total + j];
        to = canonical(input_.accumulate ? to + c[i * n + j] : c[i * n + j]);
      }
    }
    return {.flops = flops(m, n, rows), .link_bytes = 0};
  }

  const Schedule& schedule_;
  std::int64_t hidden_;
  std::int64_t ffn_;
  Saved<S>& saved_;
  const BackwardInput<S>& input_;
  Mover<S> mover_;
  std::vector<std::uint64_t> dgrad2_done_;  // [tiles] finished column tiles
  std::vector<std::uint64_t> d_activated_;  // [tiles]
  std::vector<S> d_rows_;                   // [padded_rows, hidden]
  std::vector<S> a_;                        // [padded_rows, ffn]
  std::vector<S> d_h_;                      // [padded_rows, 2 * ffn]
  std::vector<float> partials_;             // [padded_rows, blocks of 64 ffn columns]
  std::vector<float> d_a_;                  // [padded_rows, ffn], split only
  std::vector<Scratch> scratch_;            // [workers]
};

}  // namespace

template <typename S>
RankLayer<S>::RankLayer(Group& group, int rank)
    : group_(group),
      rank_(rank),
      epochs_(group.epochs(rank)),
      recorder_(rank, group.config().schedule.workers, group.config().trace_capacity) {
  if (group.config().shape.element_bytes != static_cast<std::int64_t>(sizeof(S))) {
    throw_invalid("the group holds elements of {} bytes; this layer's have {}",
                  group.config().shape.element_bytes, sizeof(S));
  }
  if (epochs_.attached.exchange(true)) {
    throw_invalid("rank {} has a layer on this group already; a rank has one at a time", rank);
  }
}

template <typename S>
RankLayer<S>::~RankLayer() {
  epochs_.attached = false;
}

// Runs body; whatever it throws poisons the group first, so that no peer waits in vain.
template <typename S>
template <typename Body>
auto RankLayer<S>::guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    abort_group(group_.state(), rank_, error.what());
    throw;
  }
}

template <typename S>
void RankLayer<S>::begin_operation(std::int64_t operation) {
  if (const auto failure = failure_of(group_.state())) {
    throw_world(
        "rank {} cannot start a {}: the group failed and has not recovered; call recover() on "
        "every rank. The failure was: {}",
        rank_, operation == 0 ? "forward" : "backward", *failure);
  }
  epochs_.current = std::max(epochs_.current + 1, epochs_.first);
}

template <typename S>
void RankLayer<S>::wait_until_consumed(std::int64_t operation) {
  if (epochs_.current == epochs_.first) return;
  for (int peer = 0; peer < group_.config().shape.num_ranks; ++peer) {
    WaitSite site;
    site.rank = rank_;
    site.stage = operation == 0 ? "forward" : "backward";
    site.role = "consumed";
    site.peer = peer;
    site.signal = Signal::consumed;
    auto* consumed = &group_.template region<RankHeader>(peer, Region::header)->consumed;
    recorder_.wait(group_.state(),
                   {.word = consumed, .expected = epochs_.current - 1, .site = site}, 0);
  }
}

template <typename S>
void RankLayer<S>::publish(std::span<const std::int32_t> topk_ids,
                           std::span<const float> topk_weights, std::int64_t num_tokens,
                           std::int64_t operation) {
  const GroupConfig& config = group_.config();
  auto* header = group_.template region<RankHeader>(rank_, Region::header);
  const auto splits = count_splits(topk_ids, config.shape.topk, config.shape.num_experts);
  std::copy(splits.begin(), splits.end(),
            group_.template region<std::int64_t>(rank_, Region::splits));
  std::copy(topk_ids.begin(), topk_ids.end(),
            group_.template region<std::int32_t>(rank_, Region::topk_ids));
  if (!topk_weights.empty()) {
    std::copy(topk_weights.begin(), topk_weights.end(),
              group_.template region<float>(rank_, Region::topk_weights));
  }
  // The reverse map needs only this rank's own counts: by (expert, token, choice).
  std::vector<std::int64_t> next(splits.size(), 0);
  for (std::size_t e = 1; e < splits.size(); ++e) next[e] = next[e - 1] + splits[e - 1];
  auto* order = group_.template region<std::int32_t>(rank_, Region::send_order);
  for (std::size_t i = 0; i < topk_ids.size(); ++i) {
    if (topk_ids[i] >= 0) order[next[size(topk_ids[i])]++] = static_cast<std::int32_t>(i);
  }
  header->num_tokens = num_tokens;
  header->operation = operation;
  header->schedule_hash = hash(config.schedule);
  raise(&header->published, epochs_.current);
}

template <typename S>
void RankLayer<S>::wait_for_peers(std::int64_t num_tokens, std::int64_t operation) {
  static_cast<void>(num_tokens);
  const std::uint64_t mine = hash(group_.config().schedule);
  for (int peer = 0; peer < group_.config().shape.num_ranks; ++peer) {
    auto* header = group_.template region<RankHeader>(peer, Region::header);
    WaitSite site;
    site.rank = rank_;
    site.stage = operation == 0 ? "forward" : "backward";
    site.role = "plan";
    site.peer = peer;
    site.signal = Signal::published;
    recorder_.wait(group_.state(),
                   {.word = &header->published, .expected = epochs_.current, .site = site}, 0);
    if (header->operation != operation || header->schedule_hash != mine) {
      throw_invalid(
          "rank {} issued a {} and rank {} a {} as operation {}; all ranks of a group "
          "must issue the same operations in the same order with the same schedule",
          rank_, operation == 0 ? "forward" : "backward", peer,
          header->operation == 0 ? "forward" : "backward", epochs_.current & 0xffffffffU);
    }
  }
}

template <typename S>
void RankLayer<S>::end_operation() {
  raise(&group_.template region<RankHeader>(rank_, Region::header)->consumed, epochs_.current);
}

template <typename S>
Saved<S> RankLayer<S>::forward(const ForwardInput<S>& input) {
  recorder_.begin(Pass::forward);
  return guarded([&] {
    const GroupConfig& config = group_.config();
    const HeapShape& shape = config.shape;
    const auto num_tokens = static_cast<std::int64_t>(input.topk_ids.size()) / shape.topk;
    const std::int64_t num_local = config.placement.num_local_experts(rank_);
    if (input.ffn < 1) throw_invalid("ffn is {}; it must be at least 1", input.ffn);
    if (num_tokens > shape.max_tokens) {
      throw_invalid("rank {} has {} tokens; max_tokens_per_rank is {}", rank_, num_tokens,
                    shape.max_tokens);
    }
    check_span("topk_ids", input.topk_ids.size(), num_tokens * shape.topk);
    check_span("topk_weights", input.topk_weights.size(), num_tokens * shape.topk);
    check_span("x", input.x.size(), num_tokens * shape.hidden);
    check_span("out", input.out.size(), num_tokens * shape.hidden);
    check_span("w1", input.w1.size(), num_local * 2 * input.ffn * shape.hidden);
    check_span("w2", input.w2.size(), num_local * shape.hidden * input.ffn);
    begin_operation(0);
    const RecordedSpan whole(recorder_, TraceKind::operation);
    wait_until_consumed(0);
    std::optional<RecordedSpan> planning(std::in_place, recorder_, TraceKind::plan);
    publish(input.topk_ids, input.topk_weights, num_tokens, 0);
    wait_for_peers(num_tokens, 0);
    std::vector<std::int64_t> splits;
    for (int peer = 0; peer < shape.num_ranks; ++peer) {
      const auto* row = group_.template region<std::int64_t>(peer, Region::splits);
      splits.insert(splits.end(), row, row + shape.num_experts);
    }
    Saved<S> saved;
    saved.plan = make_plan({.rank = rank_,
                            .topk = shape.topk,
                            .topk_ids = input.topk_ids,
                            .splits = splits,
                            .placement = &config.placement});
    saved.ffn = input.ffn;
    saved.topk_ids.assign(input.topk_ids.begin(), input.topk_ids.end());
    const std::int64_t rows = saved.plan.padded_rows();
    saved.origins.resize(size(rows));
    saved.weights.resize(size(rows));
    saved.x_rows.resize(size(rows * shape.hidden));
    saved.h.resize(size(rows * 2 * input.ffn));
    ForwardOperation<S> operation(group_, rank_, epochs_.current, saved, input);
    const std::vector<Phase> phases = operation.phases();
    planning.reset();
    run_phases(
        group_, rank_, phases,
        {.missing = [&](const Task& task) { return operation.missing(task); },
         .run = [&](const Task& task, int worker) { return operation.run(task, worker); },
         .describe = [&](const Task& task, TraceEvent& event) { operation.describe(task, event); }},
        recorder_);
    end_operation();
    return saved;
  });
}

template <typename S>
void RankLayer<S>::backward(const Saved<S>& saved, const BackwardInput<S>& input) {
  recorder_.begin(Pass::backward);
  guarded([&] {
    const GroupConfig& config = group_.config();
    const HeapShape& shape = config.shape;
    const std::int64_t num_tokens = saved.plan.num_tokens;
    const std::int64_t num_local = config.placement.num_local_experts(rank_);
    if (saved.plan.rank != rank_ || saved.plan.num_ranks != shape.num_ranks) {
      throw_invalid("the saved forward is of rank {} of {}; this layer is rank {} of {}",
                    saved.plan.rank, saved.plan.num_ranks, rank_, shape.num_ranks);
    }
    check_span("d_out", input.d_out.size(), num_tokens * shape.hidden);
    check_span("d_x", input.d_x.size(), num_tokens * shape.hidden);
    check_span("d_topk_weights", input.d_topk_weights.size(), num_tokens * shape.topk);
    check_span("w1", input.w1.size(), num_local * 2 * saved.ffn * shape.hidden);
    check_span("w2", input.w2.size(), num_local * shape.hidden * saved.ffn);
    check_span("d_w1", input.d_w1.size(), num_local * 2 * saved.ffn * shape.hidden);
    check_span("d_w2", input.d_w2.size(), num_local * shape.hidden * saved.ffn);
    begin_operation(1);
    const RecordedSpan whole(recorder_, TraceKind::operation);
    wait_until_consumed(1);
    std::optional<RecordedSpan> planning(std::in_place, recorder_, TraceKind::plan);
    publish(saved.topk_ids, {}, num_tokens, 1);
    wait_for_peers(num_tokens, 1);
    // Origins are complete after forward: backward only reads the saved values.
    auto& read_only = const_cast<Saved<S>&>(saved);
    BackwardOperation<S> operation(group_, rank_, epochs_.current, read_only, input);
    const std::vector<Phase> phases = operation.phases();
    planning.reset();
    run_phases(
        group_, rank_, phases,
        {.missing = [&](const Task& task) { return operation.missing(task); },
         .run = [&](const Task& task, int worker) { return operation.run(task, worker); },
         .describe = [&](const Task& task, TraceEvent& event) { operation.describe(task, event); }},
        recorder_);
    end_operation();
  });
}

template <typename S>
void RankLayer<S>::recover() {
  // Every rank takes the same first epoch of the new generation, above all that were ever raised.
  const std::uint64_t generation = uniep::recover(group_.state(), rank_);
  epochs_.first = (generation << 32) + 1;
}

template class RankLayer<float>;
template class RankLayer<Bf16>;

}  // namespace uniep::cpu
