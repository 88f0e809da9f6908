// SPDX-License-Identifier: Apache-2.0
#include "layer/compare.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "base/hash.hpp"
#include "uniep/bf16.hpp"

namespace uniep {
namespace {

// One result as bytes with its element type, so that all five are handled alike.
struct View {
  std::span<const std::byte> bytes;
  bool bf16 = false;
  std::int64_t columns = 1;

  [[nodiscard]] std::size_t width() const { return bf16 ? 2 : 4; }
  [[nodiscard]] std::size_t count() const { return bytes.size() / width(); }
  [[nodiscard]] float value(std::size_t i) const {
    if (bf16) {
      Bf16 element{};
      std::memcpy(&element, bytes.data() + 2 * i, 2);
      return to_float(element);
    }
    float element = 0;
    std::memcpy(&element, bytes.data() + 4 * i, 4);
    return element;
  }
};

std::array<View, 5> views(const CaseResult& r, bool bf16, const Case* data) {
  const std::int64_t hidden = data != nullptr ? data->hidden : 1;
  const std::int64_t topk = data != nullptr ? data->topk : 1;
  const std::int64_t ffn = data != nullptr ? data->ffn : 1;
  return {{{r.out, bf16, hidden},
           {r.d_x, bf16, hidden},
           {std::as_bytes(std::span(r.d_topk_weights)), false, topk},
           {std::as_bytes(std::span(r.d_w1)), false, hidden},
           {std::as_bytes(std::span(r.d_w2)), false, ffn}}};
}

ErrorBound compare(const View& got, const std::vector<double>& reference, double bound) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double difference = static_cast<double>(got.value(i)) - reference[i];
    error += difference * difference;
    norm += reference[i] * reference[i];
  }
  ErrorBound result{.relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error),
                    .bound = bound};
  if (!std::isfinite(result.relative) || got.count() != reference.size()) {
    result.relative = std::numeric_limits<double>::infinity();
  }
  return result;
}

}  // namespace

std::array<std::uint64_t, 5> hash_results(const CaseResult& result) {
  std::array<std::uint64_t, 5> hashes{};
  const auto all = views(result, false, nullptr);
  for (std::size_t i = 0; i < all.size(); ++i) hashes[i] = fnv1a(all[i].bytes);
  return hashes;
}

std::string describe_difference(const Case& data, const CaseResult& expected,
                                const CaseResult& got) {
  const bool bf16 = data.dtype == DType::bf16;
  const auto want = views(expected, bf16, &data);
  const auto have = views(got, bf16, &data);
  for (std::size_t r = 0; r < want.size(); ++r) {
    if (want[r].bytes.size() != have[r].bytes.size()) {
      return fmt::format("{} has {} elements instead of {}", kResultNames[r], have[r].count(),
                         want[r].count());
    }
    std::size_t differing = 0;
    std::size_t first = 0;
    for (std::size_t i = want[r].count(); i-- > 0;) {
      if (std::memcmp(want[r].bytes.data() + i * want[r].width(),
                      have[r].bytes.data() + i * want[r].width(), want[r].width()) != 0) {
        ++differing;
        first = i;
      }
    }
    if (differing == 0) continue;
    const auto columns = static_cast<std::size_t>(want[r].columns);
    return fmt::format(
        "{}: {} of {} elements differ, first at row {}, column {}: {:.9g} instead of {:.9g}",
        kResultNames[r], differing, want[r].count(), first / columns, first % columns,
        have[r].value(first), want[r].value(first));
  }
  return {};
}

std::array<ErrorBound, 5> compare_with_f64(const Case& data, const CaseResult& got,
                                           const ReferenceResult& reference) {
  const bool bf16 = data.dtype == DType::bf16;
  const double storage = bf16 ? std::ldexp(1.0, -8) : std::ldexp(1.0, -24);
  const double fp32 = std::ldexp(1.0, -24);
  const auto hidden = static_cast<double>(data.hidden);
  const auto ffn = static_cast<double>(data.ffn);
  const auto rows = static_cast<double>(data.num_tokens * data.topk);
  const auto topk = static_cast<double>(data.topk);
  // Roundings to storage on the longest path, each amplified where the activation is between, plus
  // one fp32 rounding per step of every chain on the path: docs/design/numerics.md, "Bounds".
  const std::array<double, 5> bounds{
      7 * storage + (3 * hidden + ffn + topk + 16) * fp32,
      10 * storage + (6 * hidden + 2 * ffn + topk + 32) * fp32,
      6 * storage + (6 * hidden + ffn + 32) * fp32,
      9 * storage + (6 * hidden + rows + 32) * fp32,
      6 * storage + (3 * hidden + rows + 16) * fp32,
  };
  const auto have = views(got, bf16, &data);
  const std::array<const std::vector<double>*, 5> want{
      &reference.out, &reference.d_x, &reference.d_topk_weights, &reference.d_w1, &reference.d_w2};
  std::array<ErrorBound, 5> result;
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = compare(have[i], *want[i], bounds[i]);
  }
  return result;
}

}  // namespace uniep
