// SPDX-License-Identifier: Apache-2.0
#include "base/memory.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <optional>

#include "base/error.hpp"

namespace uniep {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

std::uint64_t system_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    std::uint64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib * 1024;
  }
  return kUnlimited;
}

// The tightest control group (version 2) on the way from this process to the root.
std::uint64_t control_group_bytes() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  std::uint64_t least = kUnlimited;
  while (std::getline(file, line)) {
    if (line.rfind("0::/", 0) != 0) continue;
    std::string folder = line.substr(3);
    while (true) {
      const std::string base = "/sys/fs/cgroup" + folder + "/memory.";
      const auto limit = read_number(base + "max");
      const auto used = read_number(base + "current");
      if (limit && used) least = std::min(least, *limit - std::min(*limit, *used));
      if (folder.empty() || folder == "/") break;
      folder.resize(folder.rfind('/'));
    }
  }
  return least;
}

std::uint64_t address_space_bytes() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  const auto pages = read_number("/proc/self/statm");  // the first number: pages of address space
  const std::uint64_t used =
      pages ? *pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
  return limit.rlim_cur - std::min<std::uint64_t>(limit.rlim_cur, used);
}

}  // namespace

std::uint64_t available_bytes() {
  return std::min({system_bytes(), control_group_bytes(), address_space_bytes()});
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 7> kUnits{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} bytes", bytes)
                   : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

void require_memory(double bytes, const std::string& what) {
  const std::uint64_t available = available_bytes();
  if (bytes <= static_cast<double>(available)) return;
  throw_world(
      "{} needs about {} of memory and {} are available; use fewer tokens or a smaller shape", what,
      bytes_text(bytes), bytes_text(static_cast<double>(available)));
}

}  // namespace uniep
