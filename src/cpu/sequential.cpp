// SPDX-License-Identifier: Apache-2.0
#include "cpu/sequential.hpp"

#include "base/error.hpp"

namespace uniep::cpu {
namespace {

template <typename A>
A chain_portable(const A* a, std::int64_t a_step, const A* b, std::int64_t b_step,
                 std::int64_t length) {
  A acc{0};
  for (std::int64_t i = 0; i < length; ++i) acc = std::fma(a[i * a_step], b[i * b_step], acc);
  return acc;
}

#if defined(__x86_64__)
// The same loop with std::fma as one instruction; where the processor has it, the bits are the
// same.
template <typename A>
__attribute__((target("fma"))) A chain_fma(const A* a, std::int64_t a_step, const A* b,
                                           std::int64_t b_step, std::int64_t length) {
  A acc{0};
  for (std::int64_t i = 0; i < length; ++i) acc = std::fma(a[i * a_step], b[i * b_step], acc);
  return acc;
}
#endif

// One dot product: acc = fma(a, b, acc), ascending, from +0.
template <typename A>
A chain(const A* a, std::int64_t a_step, const A* b, std::int64_t b_step, std::int64_t length) {
#if defined(__x86_64__)
  static const bool has_fma = __builtin_cpu_supports("fma") != 0;
  if (has_fma) return chain_fma(a, a_step, b, b_step, length);
#endif
  return chain_portable(a, a_step, b, b_step, length);
}

template <typename S>
std::vector<Acc<S>> widen_all(std::span<const S> values) {
  std::vector<Acc<S>> wide(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) wide[i] = widen(values[i]);
  return wide;
}

template <typename S>
class Sequential {
  using A = Acc<S>;

 public:
  explicit Sequential(const SequentialInput<S>& input)
      : in_(input),
        x_(widen_all(input.x)),
        w1_(widen_all(input.w1)),
        w2_(widen_all(input.w2)),
        d_out_(widen_all(input.d_out)) {}

  SequentialResult<S> run() {
    const bool backward = in_.backward;
    const std::int64_t choices = in_.num_tokens * in_.topk;
    y_.assign(size(choices * in_.hidden), S{});
    if (backward) {
      d_rows_.assign(y_.size(), S{});
      result_.d_topk_weights.assign(size(choices), A{0});
      result_.d_w1.assign(w1_.size(), A{0});
      result_.d_w2.assign(w2_.size(), A{0});
    }
    for (std::int32_t expert = 0; expert < in_.num_experts; ++expert) {
      rows_.clear();
      for (std::int64_t i = 0; i < choices; ++i) {
        if (in_.topk_ids[size(i)] == expert) rows_.push_back(i);
      }
      run_expert(expert, backward);
    }
    result_.out = sum_choices(y_);
    if (backward) result_.d_x = sum_choices(d_rows_);
    return std::move(result_);
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  const A* x_row(std::int64_t row) const {
    return x_.data() + rows_[size(row)] / in_.topk * in_.hidden;
  }
  const A* d_out_row(std::int64_t row) const {
    return d_out_.data() + rows_[size(row)] / in_.topk * in_.hidden;
  }

  void run_expert(std::int32_t expert, bool backward) {
    const auto num_rows = static_cast<std::int64_t>(rows_.size());
    const std::int64_t hidden = in_.hidden;
    const std::int64_t ffn = in_.ffn;
    const A* w1 = w1_.data() + expert * 2 * ffn * hidden;
    const A* w2 = w2_.data() + expert * hidden * ffn;
    h_.resize(size(num_rows * 2 * ffn));
    a_.resize(size(num_rows * ffn));
    d_h_.resize(backward ? h_.size() : 0);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      const std::int64_t choice = rows_[size(row)];
      const float weight = in_.topk_weights[size(choice)];
      S* h = h_.data() + row * 2 * ffn;
      for (std::int64_t n = 0; n < 2 * ffn; ++n) {
        h[n] = narrow<S>(chain(x_row(row), 1, w1 + n * hidden, 1, hidden));
      }
      A* a = a_.data() + row * ffn;
      for (std::int64_t f = 0; f < ffn; ++f) a[f] = widen(activation(h[f], h[ffn + f], weight));
      for (std::int64_t n = 0; n < hidden; ++n) {
        y_[size(choice * hidden + n)] = narrow<S>(chain(a, 1, w2 + n * ffn, 1, ffn));
      }
      if (backward) run_row_backward(row, w1, w2);
    }
    if (backward) run_weight_gradients(expert, num_rows);
  }

  void run_row_backward(std::int64_t row, const A* w1, const A* w2) {
    const std::int64_t hidden = in_.hidden;
    const std::int64_t ffn = in_.ffn;
    const std::int64_t choice = rows_[size(row)];
    const S* h = h_.data() + row * 2 * ffn;
    A* d_h = d_h_.data() + row * 2 * ffn;
    std::vector<A> terms(size(ffn));
    for (std::int64_t f = 0; f < ffn; ++f) {
      const A d_a = chain(d_out_row(row), 1, w2 + f, ffn, hidden);
      const auto gradient =
          activation_gradient<S>(h[f], h[ffn + f], in_.topk_weights[size(choice)], d_a);
      d_h[f] = widen(gradient.d_g);
      d_h[ffn + f] = widen(gradient.d_u);
      terms[size(f)] = gradient.d_weight;
    }
    A sum{0};
    for (std::int64_t f = 0; f < ffn; f += kTreeBlock) {
      sum += tree_sum<A>(
          std::span<const A>(terms).subspan(size(f), size(std::min(kTreeBlock, ffn - f))));
    }
    result_.d_topk_weights[size(choice)] = canonical(sum);
    for (std::int64_t n = 0; n < hidden; ++n) {
      d_rows_[size(choice * hidden + n)] = narrow<S>(chain(d_h, 1, w1 + n, hidden, 2 * ffn));
    }
  }

  void run_weight_gradients(std::int32_t expert, std::int64_t num_rows) {
    const std::int64_t hidden = in_.hidden;
    const std::int64_t ffn = in_.ffn;
    // Gathered so that a column of rows has one stride.
    std::vector<A> x(size(num_rows * hidden));
    std::vector<A> d_out(size(num_rows * hidden));
    for (std::int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(x_row(row), hidden, x.data() + row * hidden);
      std::copy_n(d_out_row(row), hidden, d_out.data() + row * hidden);
    }
    A* d_w1 = result_.d_w1.data() + expert * 2 * ffn * hidden;
    for (std::int64_t n = 0; n < 2 * ffn; ++n) {
      for (std::int64_t i = 0; i < hidden; ++i) {
        d_w1[n * hidden + i] =
            canonical(chain(d_h_.data() + n, 2 * ffn, x.data() + i, hidden, num_rows));
      }
    }
    A* d_w2 = result_.d_w2.data() + expert * hidden * ffn;
    for (std::int64_t i = 0; i < hidden; ++i) {
      for (std::int64_t f = 0; f < ffn; ++f) {
        d_w2[i * ffn + f] =
            canonical(chain(d_out.data() + i, hidden, a_.data() + f, ffn, num_rows));
      }
    }
  }

  std::vector<S> sum_choices(const std::vector<S>& rows) const {
    std::vector<S> out(size(in_.num_tokens * in_.hidden));
    for (std::int64_t token = 0; token < in_.num_tokens; ++token) {
      for (std::int64_t n = 0; n < in_.hidden; ++n) {
        A sum{0};
        for (std::int64_t choice = token * in_.topk; choice < (token + 1) * in_.topk; ++choice) {
          if (in_.topk_ids[size(choice)] < 0) continue;
          sum += widen(rows[size(choice * in_.hidden + n)]);
        }
        out[size(token * in_.hidden + n)] = narrow<S>(sum);
      }
    }
    return out;
  }

  const SequentialInput<S>& in_;
  std::vector<A> x_, w1_, w2_, d_out_;
  std::vector<std::int64_t> rows_;  // token * topk + choice of this expert's rows
  std::vector<S> h_, y_, d_rows_;
  std::vector<A> a_, d_h_;
  SequentialResult<S> result_;
};

}  // namespace

template <typename S>
SequentialResult<S> run_sequential(const SequentialInput<S>& input) {
  return Sequential<S>(input).run();
}

template SequentialResult<float> run_sequential(const SequentialInput<float>&);
template SequentialResult<Bf16> run_sequential(const SequentialInput<Bf16>&);
template SequentialResult<double> run_sequential(const SequentialInput<double>&);

}  // namespace uniep::cpu
