// SPDX-License-Identifier: Apache-2.0
#include "uniep/job.hpp"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "base/error.hpp"
#include "base/limits.hpp"

namespace uniep {
namespace {

std::string_view text_of(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? std::string_view{} : std::string_view{value};
}

int number_of(const char* variable, int low, int high) {
  const std::string_view text = text_of(variable);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < low || value > high) {
    throw_invalid("the environment has {}={}; it must be a whole number from {} to {}", variable,
                  text, low, high);
  }
  return value;
}

struct Launcher {
  const char* rank;
  const char* size;
  const char* local_size;  // ranks on this machine, where the launcher tells
};
constexpr std::array<Launcher, 3> kLaunchers{{
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"},
    {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"},
}};

// The same for all processes of one launch, another for every other launch on this machine.
std::string name_of_launch(const Launcher& launcher) {
  if (const auto name = text_of("UNIEP_JOB"); !name.empty()) return std::string(name);
  if (std::string_view(launcher.rank) == "RANK") {
    const auto port = text_of("MASTER_PORT");
    if (port.empty()) {
      throw_invalid(
          "the environment has RANK and WORLD_SIZE but neither MASTER_PORT nor UNIEP_JOB, which "
          "would tell this launch from others; set one of them to the same value for all ranks");
    }
    return fmt::format("torchrun {}:{} {} restart {}", text_of("MASTER_ADDR"), port,
                       text_of("TORCHELASTIC_RUN_ID"), text_of("TORCHELASTIC_RESTART_COUNT"));
  }
  if (const auto name = text_of("PMIX_NAMESPACE"); !name.empty())
    return fmt::format("mpi {}", name);
  // On one machine all ranks are children of the launcher's daemon.
  return fmt::format("mpi child of process {}", ::getppid());
}

}  // namespace

std::optional<Job> job_from_environment() {
  for (const Launcher& launcher : kLaunchers) {
    if (text_of(launcher.rank).empty() || text_of(launcher.size).empty()) continue;
    Job job;
    job.num_ranks = number_of(launcher.size, 1, kMaxRanks);
    job.rank = number_of(launcher.rank, 0, job.num_ranks - 1);
    if (!text_of(launcher.local_size).empty()) {
      const int local = number_of(launcher.local_size, 1, kMaxRanks);
      if (local != job.num_ranks) {
        throw_world("{} of {} ranks are on this machine; the CPU backend needs all on one", local,
                    job.num_ranks);
      }
    }
    job.name = name_of_launch(launcher);
    return job;
  }
  return std::nullopt;
}

}  // namespace uniep
