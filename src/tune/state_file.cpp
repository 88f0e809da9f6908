// SPDX-License-Identifier: Apache-2.0
#include "tune/state_file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <thread>
#include <utility>

#include "base/error.hpp"
#include "io/output_file.hpp"

namespace uniep::tune {
namespace {

constexpr std::size_t kMostBytes = 16 << 20;
constexpr auto kLockBound = std::chrono::seconds(2);

// Of a file beside the state, which itself is replaced and so cannot carry a lock.
class Lock {
 public:
  explicit Lock(const std::string& path)
      : fd_(::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644)) {
    if (fd_ < 0) {
      error_ = std::strerror(errno);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      if (std::chrono::steady_clock::now() - start > kLockBound) {
        error_ = "another process holds it";
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  ~Lock() {
    if (fd_ >= 0) ::close(fd_);  // which ends the lock
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  [[nodiscard]] const std::string& error() const { return error_; }

 private:
  int fd_;
  std::string error_;
};

}  // namespace

StateFile::StateFile(std::string path, std::string kind, int version, Warn warn)
    : path_(std::move(path)), kind_(std::move(kind)), version_(version), warn_(std::move(warn)) {}

void StateFile::warn(const std::string& text) {
  if (const Warn once = std::exchange(warn_, nullptr)) once(text);
}

nlohmann::json StateFile::read() {
  std::ifstream file(path_, std::ios::binary);
  if (!file.is_open()) return nlohmann::json::object();
  std::string text(kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  const nlohmann::json all = nlohmann::json::parse(text, nullptr, false);
  if (all.is_discarded() || !all.is_object() || !all.contains(kind_)) {
    warn("'" + path_ + "' is no file of uniep's (" + kind_ + "); it is ignored and rewritten");
    return nlohmann::json::object();
  }
  if (all[kind_] != version_ || !all.contains("entries") || !all["entries"].is_object()) {
    warn(fmt::format("'{}' is version {} of {} and this build's is {}; it is ignored and rewritten",
                     path_, all[kind_].dump(), kind_, version_));
    return nlohmann::json::object();
  }
  return all["entries"];
}

bool StateFile::update(const std::function<void(nlohmann::json& entries)>& change) {
  std::error_code ignored;
  const auto folder = std::filesystem::path(path_).parent_path();
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  const Lock lock(path_ + ".lock");
  if (!lock.error().empty()) {
    warn("'" + path_ + ".lock' cannot be locked, so nothing is stored: " + lock.error());
    return false;
  }
  nlohmann::json entries = read();
  change(entries);
  try {
    const std::string text = nlohmann::json{{kind_, version_}, {"entries", entries}}.dump(
                                 1, ' ', false, nlohmann::json::error_handler_t::replace) +
                             "\n";
    OutputFile file("file of tuned schedules", path_);
    file.write(std::as_bytes(std::span(text)));
    file.sync();
    file.publish();
  } catch (const Error& error) {
    warn(std::string("nothing is stored: ") + error.what());
    return false;
  }
  return true;
}

std::string state_folder() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (const std::string folder = variable("UNIEP_CACHE"); !folder.empty()) return folder;
  if (const std::string folder = variable("XDG_CACHE_HOME"); !folder.empty()) {
    return folder + "/uniep";
  }
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/uniep";
  return "";
}

}  // namespace uniep::tune
