// SPDX-License-Identifier: Apache-2.0
#include "layer/rank_processes.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "base/error.hpp"

namespace uniep {
namespace {

// What a rank writes into its pipe when its work has ended, one way or the other.
struct Message {
  std::uint64_t magic = kMagic;
  std::int64_t error = kNoError;  // an ErrorCode
  std::uint64_t text_bytes = 0;   // the error's sentence follows
  std::int64_t num_dropped = 0;   // of the trace
  std::uint64_t num_events = 0;   // which then follow

  static constexpr std::uint64_t kMagic = 0x756E6965702D6F6BU;
  static constexpr std::int64_t kNoError = -1;
};

struct Child {
  pid_t pid = -1;
  int pipe = -1;  // our end; -1 once it has ended
  std::string received;
  std::optional<Error> error;
  Trace trace;
};

void write_all(int fd, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the parent is gone, and this process with it
    from += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

[[noreturn]] void run_child(int fd, int rank, GroupState& state, const RankBody& body) {
  Message message;
  std::string text;
  Trace trace;
  try {
    body(rank, trace);
  } catch (const Error& error) {
    message.error = static_cast<std::int64_t>(error.code());
    text = error.what();
  } catch (const std::exception& error) {
    message.error = static_cast<std::int64_t>(ErrorCode::world);
    text = error.what();
  }
  if (message.error != Message::kNoError) abort_group(state, rank, text);
  message.text_bytes = text.size();
  message.num_dropped = trace.dropped;
  message.num_events = trace.events.size();
  write_all(fd, &message, sizeof message);
  write_all(fd, text.data(), text.size());
  write_all(fd, trace.events.data(), trace.events.size() * sizeof(TraceEvent));
  // No destructors, no exit handlers: all that this process has is its parent's.
  std::_Exit(0);
}

void start(Child& child, int rank, GroupState& state, std::vector<Child>& others,
           const RankBody& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    throw_world("the system refused a pipe for rank {}: {}", rank, std::strerror(errno));
  }
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) {
    const int reason = errno;
    ::close(ends[0]);
    ::close(ends[1]);
    throw_world("the system refused a process for rank {} of {}: {}; use fewer ranks", rank,
                state.num_ranks, std::strerror(reason));
  }
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) std::_Exit(1);  // it died before it could be watched
    for (const Child& other : others) {
      if (other.pipe >= 0) ::close(other.pipe);
    }
    ::close(ends[0]);
    run_child(ends[1], rank, state, body);
  }
  ::close(ends[1]);
  child.pid = pid;
  child.pipe = ends[0];
}

std::string describe_end(int rank, pid_t pid, int status) {
  if (WIFSIGNALED(status)) {
    return fmt::format("rank {} (process {}) was ended by signal {} ({})", rank, pid,
                       WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  }
  return fmt::format("rank {} (process {}) ended with exit code {} before its work was done", rank,
                     pid, WEXITSTATUS(status));
}

// The rank's pipe has ended: takes in what it said, or how it died.
void finish(Child& child, int rank, GroupState& state) {
  ::close(child.pipe);
  child.pipe = -1;
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  Message message;
  const std::string& got = child.received;
  if (got.size() >= sizeof message) std::memcpy(&message, got.data(), sizeof message);
  const std::size_t want =
      sizeof message + message.text_bytes + message.num_events * sizeof(TraceEvent);
  if (got.size() < sizeof message || message.magic != Message::kMagic || got.size() != want) {
    const std::string text = describe_end(rank, child.pid, status);
    abort_for_lost_rank(state, rank, text);
    child.error.emplace(ErrorCode::world, text);
    return;
  }
  if (message.error != Message::kNoError) {
    child.error.emplace(static_cast<ErrorCode>(message.error),
                        got.substr(sizeof message, message.text_bytes));
  }
  child.trace.dropped = message.num_dropped;
  child.trace.events.resize(message.num_events);
  if (message.num_events > 0) {
    std::memcpy(child.trace.events.data(), got.data() + sizeof message + message.text_bytes,
                message.num_events * sizeof(TraceEvent));
  }
}

void collect(std::vector<Child>& children, GroupState& state) {
  std::vector<pollfd> polled;
  std::vector<std::size_t> ranks;
  while (true) {
    polled.clear();
    ranks.clear();
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      if (children[rank].pipe < 0) continue;
      polled.push_back({.fd = children[rank].pipe, .events = POLLIN, .revents = 0});
      ranks.push_back(rank);
    }
    if (polled.empty()) return;
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    for (std::size_t i = 0; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      Child& child = children[ranks[i]];
      char buffer[65536];
      const ssize_t count = ::read(child.pipe, buffer, sizeof buffer);
      if (count > 0) {
        child.received.append(buffer, static_cast<std::size_t>(count));
      } else if (count == 0 || errno != EINTR) {
        finish(child, static_cast<int>(ranks[i]), state);
      }
    }
  }
}

}  // namespace

void run_rank_processes(GroupState& state, const RankBody& body, Trace& trace) {
  std::vector<Child> children(static_cast<std::size_t>(state.num_ranks));
  std::exception_ptr not_started;
  try {
    for (int rank = 0; rank < state.num_ranks; ++rank) {
      start(children[static_cast<std::size_t>(rank)], rank, state, children, body);
    }
  } catch (const std::exception& error) {
    not_started = std::current_exception();
    abort_group(state, 0, error.what());
  }
  collect(children, state);
  for (const Child& child : children) {
    const auto& events = child.trace.events;
    trace.events.insert(trace.events.end(), events.begin(), events.end());
    trace.dropped += child.trace.dropped;
  }
  if (not_started) std::rethrow_exception(not_started);
  // The cause, of the rank that failed first; its peers' errors are consequences.
  const std::uint64_t failed = state.abort_word.load();
  if (failed > 0 && children[failed - 1].error) throw Error(*children[failed - 1].error);
  for (const Child& child : children) {
    if (child.error) throw Error(*child.error);
  }
}

}  // namespace uniep
