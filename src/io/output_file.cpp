// SPDX-License-Identifier: Apache-2.0
#include "io/output_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.hpp"
#include "io/tensor_file.hpp"

namespace uniep {
namespace {

std::string error_text(int error) { return std::generic_category().message(error); }

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
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
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
  }
  if (::close(std::exchange(fd_, -1)) != 0) fail(errno);
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_.clear();
  // The name itself, as far as the file system allows it.
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  ::fsync(folder);
  ::close(folder);
}

std::filesystem::path OutputFile::new_name() const {
  static std::atomic<std::uint64_t> serial = 0;
  return folder_ / fmt::format(".uniep-{}-{}.tmp", ::getpid(), serial++);
}

void OutputFile::open_beside_target() {
  do {
    temporary_ = new_name();
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && (errno == EEXIST || errno == EINTR));
  if (fd_ < 0) {
    const int error = errno;
    temporary_.clear();
    fail(error);
  }
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

}  // namespace uniep
