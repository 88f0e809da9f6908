// SPDX-License-Identifier: Apache-2.0
// A file that appears under its name complete or not at all.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace uniep {

// Written without a name (or, where the file system cannot, under a temporary one beside the
// target), synced, and named on publish(). Replacing a file takes a temporary name for a moment; a
// process killed then, or anywhere where the file must have one, leaves it unless
// remove_unfinished_files_on_signals() was called and the signal is one of its.
// A character device such as /dev/null is written directly. Errors of all members: invalid_argument
// where the path cannot be written, world for a full disk and the like.
class OutputFile {
 public:
  // `kind`, such as "tensor file", begins the error texts. Nothing exists under `path` yet.
  OutputFile(std::string_view kind, const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  // What was written is on the disk: publish() can hardly fail afterwards.
  void sync();
  void publish();

 private:
  [[noreturn]] void fail(int error) const;
  [[nodiscard]] std::filesystem::path new_name() const;
  void open_beside_target();
  void rename_to_target();

  std::string kind_;
  std::string path_;
  std::filesystem::path target_;
  std::filesystem::path folder_;
  std::filesystem::path temporary_;  // empty while the file has no name
  int fd_ = -1;
  bool is_device_ = false;
};

// For programs, not for libraries: SIGHUP, SIGINT and SIGTERM, unless they are ignored, end this
// process as they do by default, but no temporary name of an OutputFile stays behind.
void remove_unfinished_files_on_signals();

}  // namespace uniep
