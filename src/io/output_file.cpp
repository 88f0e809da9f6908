// SPDX-License-Identifier: Apache-2.0
#include "io/output_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <ctime>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "io/tensor_file.hpp"

namespace uniep {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

constexpr std::array kEndingSignals{SIGHUP, SIGINT, SIGTERM};

// The temporary names that exist. A thread holds the lock while it makes, renames or removes one,
// with the ending signals blocked: their handler takes the same lock and must not interrupt its
// holder.
class TemporaryNames {
 public:
  void lock() {
    sigset_t ending;
    sigset_t old;
    ::sigemptyset(&ending);
    for (const int signal : kEndingSignals) ::sigaddset(&ending, signal);
    ::pthread_sigmask(SIG_BLOCK, &ending, &old);
    while (is_locked_.test_and_set(std::memory_order_acquire)) rest();
    mask_before_ = old;
  }
  void unlock() {
    const sigset_t old = mask_before_;
    is_locked_.clear(std::memory_order_release);
    ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  // Under the lock.
  void add(const std::string& path) { entries_.push_back({::getpid(), path}); }
  void remove(const std::string& path) {
    std::erase_if(entries_, [&](const Entry& entry) { return entry.path == path; });
  }

  // In the handler, where only calls that are safe there may be made. Keeps the lock: no further
  // name is made while the process ends.
  void remove_all_files() {
    for (int i = 0; is_locked_.test_and_set(std::memory_order_acquire); ++i) {
      if (i == 2000) return;  // two seconds: a file system that hangs must not keep the process
      rest();
    }
    const pid_t process = ::getpid();  // a forked child knows its parent's names
    for (const Entry& entry : entries_) {
      if (entry.process == process) ::unlink(entry.path.c_str());
    }
  }

 private:
  struct Entry {
    pid_t process = 0;
    std::string path;
  };
  static void rest() {
    const timespec millisecond{.tv_sec = 0, .tv_nsec = 1000000};
    ::nanosleep(&millisecond, nullptr);
  }

  std::atomic_flag is_locked_;
  sigset_t mask_before_{};  // of the holder
  std::vector<Entry> entries_;
};

// Lives until the process ends: the handler may run at any time.
TemporaryNames& temporary_names() {
  static auto* const names = new TemporaryNames;
  return *names;
}

extern "C" void end_without_unfinished_files(int signal) {
  temporary_names().remove_all_files();
  ::signal(signal, SIG_DFL);
  ::raise(signal);  // delivered when the handler returns
}

std::string link_of(int fd) { return fmt::format("/proc/self/fd/{}", fd); }

}  // namespace

OutputFile::OutputFile(std::string_view kind, const std::string& path)
    : kind_(kind), path_(path), target_(path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_character_file(status)) {
    is_device_ = true;
    fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (fd_ < 0) fail(errno);
    return;
  }
  if (std::filesystem::exists(status)) {
    if (!std::filesystem::is_regular_file(status)) {
      throw_invalid(
          "{} {} cannot be written: there is something else than a regular file of that name",
          kind_, quote(path_));
    }
    // Behind a symbolic link the file changes, not the link.
    if (auto real = std::filesystem::canonical(path, ignored); !ignored) target_ = real;
  }
  if (std::filesystem::is_symlink(std::filesystem::symlink_status(target_, ignored))) {
    throw_invalid("{} {} cannot be written: it is a symbolic link that leads nowhere", kind_,
                  quote(path_));
  }
  if (!target_.has_filename()) throw_invalid("{} {} has no file name", kind_, quote(path_));
  folder_ = target_.has_parent_path() ? target_.parent_path() : ".";
  fd_ = ::open(folder_.c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (fd_ >= 0 && ::access(link_of(fd_).c_str(), F_OK) == 0) return;
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  open_beside_target();
}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (temporary_.empty()) return;
  const std::lock_guard lock(temporary_names());
  ::unlink(temporary_.c_str());
  temporary_names().remove(temporary_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(errno);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void OutputFile::sync() {
  if (!is_device_ && ::fsync(fd_) != 0) fail(errno);
}

void OutputFile::publish() {
  if (is_device_) return;
  sync();
  rename_to_target();
  // The name itself, as far as the file system allows it.
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

void OutputFile::rename_to_target() {
  const std::lock_guard lock(temporary_names());
  if (temporary_.empty()) {
    // A link cannot replace a file, only a rename can: the name beside it lives for that moment.
    int linked = 0;
    do {
      temporary_ = new_name();
      linked =
          ::linkat(AT_FDCWD, link_of(fd_).c_str(), AT_FDCWD, temporary_.c_str(), AT_SYMLINK_FOLLOW);
    } while (linked != 0 && errno == EEXIST);
    if (linked != 0) {
      const int error = errno;
      temporary_.clear();
      fail(error);
    }
    temporary_names().add(temporary_);
  }
  if (::close(std::exchange(fd_, -1)) != 0) fail(errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_names().remove(temporary_);
  temporary_.clear();
}

std::filesystem::path OutputFile::new_name() const {
  static std::atomic<std::uint64_t> serial = 0;
  return folder_ / fmt::format(".uniep-{}-{}.tmp", ::getpid(), serial++);
}

void OutputFile::open_beside_target() {
  const std::lock_guard lock(temporary_names());
  do {
    temporary_ = new_name();
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && (errno == EEXIST || errno == EINTR));
  if (fd_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail(error);
  }
  temporary_names().add(temporary_);
}

void OutputFile::fail(int error) const {
  switch (error) {
    case EACCES:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENOENT:
    case ENOTDIR:
    case EPERM:
    case EROFS:
      throw_invalid("{} {} cannot be written: {}; choose an existing, writable folder", kind_,
                    quote(path_), error_text(error));
    default:
      throw_world("{} {} cannot be written: {}", kind_, quote(path_), error_text(error));
  }
}

void remove_unfinished_files_on_signals() {
  static_cast<void>(temporary_names());
  for (const int signal : kEndingSignals) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action = {};
    action.sa_handler = end_without_unfinished_files;
    ::sigemptyset(&action.sa_mask);
    for (const int other : kEndingSignals) ::sigaddset(&action.sa_mask, other);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace uniep
