// SPDX-License-Identifier: Apache-2.0
#include "memory/bootstrap.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <span>

#include "base/error.hpp"
#include "base/hash.hpp"
#include "base/memory.hpp"

namespace uniep {
namespace {

using Clock = std::chrono::steady_clock;

enum class Kind : std::uint32_t { hello, memory, refusal, leave, descriptor };

// One packet: this, then `text_bytes` of text; a memory packet carries a descriptor as well.
struct Header {
  std::uint64_t magic = kMagic;
  Kind kind = Kind::hello;
  std::uint32_t text_bytes = 0;
  std::int32_t rank = 0;
  std::int32_t num_ranks = 0;
  std::int64_t process = 0;
  std::uint64_t memory_bytes = 0;
  ErrorCode refusal = ErrorCode::world;

  static constexpr std::uint64_t kMagic = 0x756E6965702D6A32U;  // grows with every change of this
};

struct Packet {
  Header header;
  std::string text;
  Descriptor descriptor;
};

constexpr std::size_t kMaxText = 8192;

void send_packet(int socket, Header header, std::string_view text, int descriptor = -1) {
  text = text.substr(0, kMaxText);
  header.text_bytes = static_cast<std::uint32_t>(text.size());
  header.process = ::getpid();
  std::string bytes(sizeof header, '\0');
  std::memcpy(bytes.data(), &header, sizeof header);
  bytes += text;
  iovec vector{.iov_base = bytes.data(), .iov_len = bytes.size()};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
  }
  // A peer that is gone is noticed by whoever listens to it.
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

// A packet of ours, or nothing where the connection has ended or somebody else speaks.
std::optional<Packet> receive_packet(int socket) {
  std::string bytes(sizeof(Header) + kMaxText, '\0');
  iovec vector{.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t count = 0;
  while ((count = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR) {
  }
  Packet packet;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(part), sizeof descriptor);
    packet.descriptor = Descriptor(descriptor);
  }
  if (count < static_cast<ssize_t>(sizeof(Header))) return std::nullopt;
  std::memcpy(&packet.header, bytes.data(), sizeof(Header));
  const std::size_t text_bytes = static_cast<std::size_t>(count) - sizeof(Header);
  if (packet.header.magic != Header::kMagic || packet.header.text_bytes != text_bytes) {
    return std::nullopt;
  }
  packet.text = bytes.substr(sizeof(Header), text_bytes);
  return packet;
}

// Without a file: a leading zero byte, then a name of this user and job.
struct Address {
  sockaddr_un address{};
  socklen_t length = 0;
};

Address address_of(const Job& job) {
  const auto hash = fnv1a(std::as_bytes(std::span(job.name)));
  const std::string name = fmt::format("uniep-{}-{:016x}", ::getuid(), hash);
  Address result;
  result.address.sun_family = AF_UNIX;
  std::memcpy(result.address.sun_path + 1, name.data(), name.size());
  result.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

// Neither connecting to a full queue nor sending to a process that is stopped may block for long.
void limit_sends(int socket) {
  const timeval second{.tv_sec = 1, .tv_usec = 0};
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second));
}

Descriptor open_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.get() < 0) throw_world("the system refused a socket: {}", std::strerror(errno));
  limit_sends(socket.get());
  return socket;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::getuid();
}

std::int64_t milliseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

// Milliseconds until then for poll, at least 0, rounded up.
int until(Clock::time_point deadline) {
  const std::int64_t left = milliseconds(deadline - Clock::now()) + 1;
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000 * 1000));
}

std::string lost_text(int rank, std::int64_t process) {
  return fmt::format("rank {} (process {}) ended before its work was done", rank, process);
}

// What `rank` waits for from a peer.
struct Expected {
  int rank = 0;
  int peer = 0;
  std::int64_t process = 0;  // of the peer
  Kind kind = Kind::memory;
  const char* what = "";
};

// The peer's next packet, with a descriptor. Errors: world if it does not come until `deadline`, or
// the peer is gone; what the peer says if the group has failed there.
Packet await_packet(int socket, const Expected& e, Clock::time_point start,
                    Clock::time_point deadline, const std::string& job) {
  pollfd polled{.fd = socket, .events = POLLIN, .revents = 0};
  int ready = 0;
  while ((ready = ::poll(&polled, 1, until(deadline))) <= 0 && Clock::now() < deadline) {
  }
  if (ready <= 0) {
    throw_world("rank {} waited {} ms for the {} of job '{}' from rank {}", e.rank,
                milliseconds(deadline - start), e.what, job, e.peer);
  }
  auto packet = receive_packet(socket);
  if (!packet) throw_world("{}", lost_text(e.peer, e.process));
  if (packet->header.kind == Kind::refusal) {
    throw Error(
        packet->header.refusal,
        fmt::format("rank {} stopped because the group was not made: {}", e.rank, packet->text));
  }
  if (packet->header.kind != e.kind || packet->descriptor.get() < 0) {
    throw_world("{}", lost_text(e.peer, e.process));
  }
  return std::move(*packet);
}

}  // namespace

Bootstrap::Bootstrap(const Job& job, const std::string& agreement, std::chrono::nanoseconds bound)
    : job_(job),
      bound_(std::min<std::chrono::nanoseconds>(bound, std::chrono::hours(24 * 365))),
      deadline_(Clock::now() + bound_),
      exceptions_(std::uncaught_exceptions()) {
  if (job.num_ranks < 1 || job.rank < 0 || job.rank >= job.num_ranks) {
    throw_invalid("the job has rank {} of {}; ranks are 0 to {}", job.rank, job.num_ranks,
                  job.num_ranks - 1);
  }
  if (job.name.empty()) throw_invalid("the job's name is empty; all its ranks must share one");
  if (agreement.size() > kMaxText) throw_invalid("the agreement has {} bytes", agreement.size());
  if (job.num_ranks == 1) return;
  if (job.rank == 0) {
    gather(agreement);
  } else {
    join(agreement);
  }
}

std::string Bootstrap::missing() const {
  std::string text;
  for (int rank = 1; rank < job_.num_ranks; ++rank) {
    const bool here = std::any_of(peers_.begin(), peers_.end(),
                                  [rank](const Peer& peer) { return peer.rank == rank; });
    if (!here) text += fmt::format("{}{}", text.empty() ? "" : ", ", rank);
  }
  return text;
}

void Bootstrap::refuse(const Error& error) {
  for (const Peer& peer : peers_) {
    send_packet(peer.socket.get(), {.kind = Kind::refusal, .refusal = error.code()}, error.what());
  }
}

// Rank 0: waits for all others.
void Bootstrap::gather(const std::string& agreement) {
  const Address address = address_of(job_);
  Descriptor listener = open_socket();
  while (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address.address),
                address.length) != 0) {
    if (errno != EADDRINUSE || Clock::now() > deadline_) {
      throw_world("rank 0 cannot open the socket of job '{}': {}; does another job have its name?",
                  job_.name, std::strerror(errno));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (::listen(listener.get(), job_.num_ranks) != 0) {
    throw_world("rank 0 cannot listen for job '{}': {}", job_.name, std::strerror(errno));
  }
  try {
    while (static_cast<int>(peers_.size()) + 1 < job_.num_ranks) {
      std::vector<pollfd> polled{{.fd = listener.get(), .events = POLLIN, .revents = 0}};
      for (const Peer& peer : peers_) {
        polled.push_back({.fd = peer.socket.get(), .events = POLLIN, .revents = 0});
      }
      const int ready = ::poll(polled.data(), polled.size(), until(deadline_));
      if (ready == 0 && Clock::now() > deadline_) {
        throw_world("rank 0 waited {} ms for the processes of rank {} of job '{}'",
                    milliseconds(bound_), missing(), job_.name);
      }
      if (ready <= 0) continue;
      // Nobody speaks before the group is made: it has ended.
      for (std::size_t i = 1; i < polled.size(); ++i) {
        if (polled[i].revents != 0) {
          throw_world("{}", lost_text(peers_[i - 1].rank, peers_[i - 1].process));
        }
      }
      if (polled[0].revents == 0) continue;
      if (const auto hello = admit(listener)) check(*hello, agreement);
    }
  } catch (const Error& error) {
    admit_late(listener);
    refuse(error);
    throw;
  }
}

// Takes a connection in and returns its hello; nothing where it is no rank of ours.
std::optional<Bootstrap::Hello> Bootstrap::admit(const Descriptor& listener) {
  Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (socket.get() < 0 || !same_user(socket.get())) return std::nullopt;
  limit_sends(socket.get());
  // A rank says hello right after it connects.
  pollfd polled{.fd = socket.get(), .events = POLLIN, .revents = 0};
  if (::poll(&polled, 1, std::min(until(deadline_), 1000)) <= 0) return std::nullopt;
  auto packet = receive_packet(socket.get());
  if (!packet || packet->header.kind != Kind::hello) return std::nullopt;
  const Header& header = packet->header;
  peers_.push_back({std::move(socket), header.rank, header.process});
  return Hello{header.rank, header.num_ranks, header.process, std::move(packet->text)};
}

// The group has failed; whoever comes within a second, and in time, is told as well.
void Bootstrap::admit_late(const Descriptor& listener) {
  const auto end = std::min(Clock::now() + std::chrono::seconds(1), deadline_);
  while (static_cast<int>(peers_.size()) + 1 < job_.num_ranks && Clock::now() < end) {
    pollfd polled{.fd = listener.get(), .events = POLLIN, .revents = 0};
    if (::poll(&polled, 1, until(end)) > 0) static_cast<void>(admit(listener));
  }
}

void Bootstrap::check(const Hello& hello, const std::string& agreement) const {
  if (hello.num_ranks != job_.num_ranks) {
    throw_invalid("rank {} of job '{}' says that there are {} ranks; rank 0 says {}", hello.rank,
                  job_.name, hello.num_ranks, job_.num_ranks);
  }
  const auto same = std::count_if(peers_.begin(), peers_.end(),
                                  [&](const Peer& peer) { return peer.rank == hello.rank; });
  if (hello.rank < 1 || hello.rank >= job_.num_ranks || same > 1) {
    throw_invalid("two processes of job '{}' say that they are rank {}, the second is process {}",
                  job_.name, hello.rank, hello.process);
  }
  if (hello.agreement != agreement) {
    throw_invalid("ranks of job '{}' disagree: rank {} has {}; rank 0 has {}", job_.name,
                  hello.rank, hello.agreement, agreement);
  }
}

// The others: find rank 0.
void Bootstrap::join(const std::string& agreement) {
  const Address address = address_of(job_);
  Descriptor socket;
  for (int round = 0;; ++round) {
    socket = open_socket();
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.address),
                  address.length) == 0) {
      break;
    }
    if (Clock::now() > deadline_) {
      throw_world("rank {} waited {} ms for the process of rank 0 of job '{}'", job_.rank,
                  milliseconds(bound_), job_.name);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(round + 1, 20)));
  }
  if (!same_user(socket.get())) {
    throw_world("the socket of job '{}' belongs to another user", job_.name);
  }
  send_packet(socket.get(), {.kind = Kind::hello, .rank = job_.rank, .num_ranks = job_.num_ranks},
              agreement);
  ucred server{};
  socklen_t length = sizeof server;
  static_cast<void>(::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &server, &length));
  peers_.push_back({std::move(socket), 0, server.pid});
}

SharedMemory Bootstrap::share(std::size_t bytes, const std::function<void(std::byte*)>& fill) {
  if (job_.rank == 0) {
    try {
      require_memory(static_cast<double>(bytes), "the ranks' symmetric heap");
      const Descriptor file(::memfd_create("uniep", MFD_CLOEXEC));
      if (file.get() < 0 || ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
        throw_world("the system refused {} bytes of shared memory: {}", bytes,
                    std::strerror(errno));
      }
      SharedMemory memory(file.get(), bytes);
      fill(memory.data());
      for (const Peer& peer : peers_) {
        send_packet(peer.socket.get(), {.kind = Kind::memory, .memory_bytes = bytes}, "",
                    file.get());
      }
      return memory;
    } catch (const Error& error) {
      refuse(error);
      throw;
    }
  }
  const Peer& root = peers_.front();
  // Rank 0 may be waiting for others: it has its own bound, and says how that ended.
  const Packet packet = await_packet(root.socket.get(),
                                     {.rank = job_.rank, .process = root.process, .what = "memory"},
                                     deadline_ - bound_, deadline_ + bound_, job_.name);
  if (packet.header.memory_bytes != bytes) {
    throw_world("rank {} needs {} bytes of shared memory; rank 0 made {}", job_.rank, bytes,
                packet.header.memory_bytes);
  }
  return {packet.descriptor.get(), bytes};
}

std::vector<Descriptor> Bootstrap::exchange(const Descriptor& own) {
  if (job_.rank == 0) {
    try {
      return hand_round(own);
    } catch (const Error& error) {
      refuse(error);
      throw;
    }
  }
  const Peer& root = peers_.front();
  const auto start = Clock::now();
  const auto next = [&] {
    return std::move(
        await_packet(root.socket.get(),
                     {job_.rank, 0, root.process, Kind::descriptor, "ranks' descriptors"}, start,
                     start + 2 * bound_, job_.name)
            .descriptor);
  };
  // Rank 0 speaks first, when all have come: until then a word from a rank would mean its end.
  std::vector<Descriptor> all;
  all.push_back(next());
  send_packet(root.socket.get(), {.kind = Kind::descriptor, .rank = job_.rank}, "", own.get());
  for (int rank = 1; rank < job_.num_ranks; ++rank) all.push_back(next());
  return all;
}

// Rank 0: all descriptors to all others, by rank.
std::vector<Descriptor> Bootstrap::hand_round(const Descriptor& own) {
  const auto start = Clock::now();
  std::vector<Descriptor> all(static_cast<std::size_t>(job_.num_ranks));
  all[0] = Descriptor(::fcntl(own.get(), F_DUPFD_CLOEXEC, 0));
  if (all[0].get() < 0) throw_world("the system refused a descriptor: {}", std::strerror(errno));
  for (const Peer& peer : peers_) {
    send_packet(peer.socket.get(), {.kind = Kind::descriptor}, "", own.get());
  }
  for (const Peer& peer : peers_) {
    all[static_cast<std::size_t>(peer.rank)] =
        std::move(await_packet(peer.socket.get(),
                               {0, peer.rank, peer.process, Kind::descriptor, "descriptor"}, start,
                               start + bound_, job_.name)
                      .descriptor);
  }
  for (const Peer& peer : peers_) {
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      send_packet(peer.socket.get(), {.kind = Kind::descriptor}, "", all[rank].get());
    }
  }
  return all;
}

void Bootstrap::watch(GroupState& state) {
  if (peers_.empty()) return;
  stop_ = Descriptor(::eventfd(0, EFD_CLOEXEC));
  if (stop_.get() < 0) throw_world("the system refused a descriptor: {}", std::strerror(errno));
  // Signals are for the caller's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    watcher_ = std::thread([this, &state] { watch_peers(state); });
  } catch (const std::exception& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw_world("the system refused a thread that watches the ranks: {}", error.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A peer's last word, or its end without one.
void Bootstrap::hear_end(const Peer& peer, GroupState& state) {
  const auto packet = receive_packet(peer.socket.get());
  if (packet && packet->header.kind == Kind::leave) return;
  abort_for_lost_rank(state, peer.rank, lost_text(peer.rank, peer.process));
}

void Bootstrap::watch_peers(GroupState& state) {
  std::vector<const Peer*> heard;
  for (const Peer& peer : peers_) heard.push_back(&peer);
  std::vector<pollfd> polled;
  while (!heard.empty()) {
    polled.assign(1, {.fd = stop_.get(), .events = POLLIN, .revents = 0});
    for (const Peer* peer : heard) {
      polled.push_back({.fd = peer->socket.get(), .events = POLLIN, .revents = 0});
    }
    if (::poll(polled.data(), polled.size(), -1) < 0) continue;
    if (polled[0].revents != 0) return;
    for (std::size_t i = polled.size() - 1; i >= 1; --i) {
      if (polled[i].revents == 0) continue;
      hear_end(*heard[i - 1], state);
      heard.erase(heard.begin() + static_cast<std::ptrdiff_t>(i) - 1);
    }
  }
}

Bootstrap::~Bootstrap() {
  if (watcher_.joinable()) {
    const std::uint64_t one = 1;
    while (::write(stop_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
    watcher_.join();
  }
  if (std::uncaught_exceptions() > exceptions_) return;
  for (const Peer& peer : peers_) send_packet(peer.socket.get(), {.kind = Kind::leave}, "");
}

}  // namespace uniep
