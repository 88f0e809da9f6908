// SPDX-License-Identifier: Apache-2.0
#include "train/text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/memory.hpp"
#include "base/rng.hpp"
#include "io/tensor_file.hpp"

namespace uniep::train {
namespace {

constexpr std::uint64_t kWindowStream = 1000;  // far from the streams of initial weights

// -Σ n log2(n / total) over counts, in bits, ascending.
double bits(std::span<const std::int64_t> counts, std::int64_t total) {
  double sum = 0;
  for (const std::int64_t n : counts) {
    if (n == 0) continue;
    sum -= static_cast<double>(n) * std::log2(static_cast<double>(n) / static_cast<double>(total));
  }
  return sum;
}

}  // namespace

Text make_text(std::vector<std::uint8_t> bytes, const Config& config, const std::string& name) {
  Text text;
  text.bytes = std::move(bytes);
  text.hash = fnv1a(std::as_bytes(std::span(text.bytes)));
  const auto size = static_cast<std::int64_t>(text.bytes.size());
  const std::int64_t held_out =
      std::min(size / 10, kMostHeldOut) / config.sequence * config.sequence;
  text.held_out_end = size;
  text.train_end = size - held_out;
  // One sequence at least on each side.
  const std::int64_t least = 10 * config.sequence + config.context;
  if (size < least) {
    throw_invalid("{} has {} bytes; with sequence {} and context {} it must have at least {}", name,
                  size, config.sequence, config.context, least);
  }
  return text;
}

Text load_text(const std::string& path, const Config& config) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) throw_invalid("text {} does not exist", quote(path));
  if (!std::filesystem::is_regular_file(status)) {
    throw_invalid("text {} is no regular file", quote(path));
  }
  const auto size = std::filesystem::file_size(path, error);
  if (error) throw_world("text {} cannot be read: {}", quote(path), error.message());
  require_memory(static_cast<double>(size), "the text");
  std::ifstream in(path, std::ios::binary);
  if (!in) throw_invalid("text {} cannot be opened for reading", quote(path));
  std::vector<std::uint8_t> bytes(size);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (in.gcount() != static_cast<std::streamsize>(size)) {
    throw_world("text {} ended after {} of {} bytes", quote(path), in.gcount(), size);
  }
  return make_text(std::move(bytes), config, fmt::format("text {}", quote(path)));
}

std::int64_t window_of(const Text& text, const Config& config, std::int64_t step,
                       std::int64_t index) {
  Rng rng(static_cast<std::uint64_t>(config.seed), kWindowStream);
  rng.seek(static_cast<std::uint64_t>(step * config.batch + index));
  // One draw each keeps draws addressable; the remainder favours early places by less than 2^-30.
  const std::int64_t places = text.train_end - config.sequence - config.context + 1;
  return config.context +
         static_cast<std::int64_t>(rng.next() % static_cast<std::uint64_t>(places));
}

double unigram_entropy(std::span<const std::uint8_t> bytes) {
  std::array<std::int64_t, kBytes> counts{};
  for (const std::uint8_t byte : bytes) ++counts[byte];
  const auto total = static_cast<std::int64_t>(bytes.size());
  return total == 0 ? 0 : bits(counts, total) / static_cast<double>(total);
}

double order1_entropy(std::span<const std::uint8_t> bytes) {
  if (bytes.size() < 2) return 0;
  std::vector<std::int64_t> pairs(count(kBytes * kBytes));
  std::array<std::int64_t, kBytes> firsts{};
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    ++pairs[std::size_t{bytes[i]} * kBytes + bytes[i + 1]];
    ++firsts[bytes[i]];
  }
  double sum = 0;
  for (std::size_t first = 0; first < firsts.size(); ++first) {
    if (firsts[first] == 0) continue;
    sum += bits(std::span(pairs).subspan(first * kBytes, kBytes), firsts[first]);
  }
  return sum / static_cast<double>(bytes.size() - 1);
}

}  // namespace uniep::train
