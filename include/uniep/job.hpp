// SPDX-License-Identifier: Apache-2.0
// Ranks as processes that a launcher started, on one machine: torchrun, mpirun, or a program's own.
#pragma once

#include <optional>
#include <string>

#include "uniep/export.h"

namespace uniep {

// This process as a rank of a group. The processes of a group find each other by `name`, which must
// be the same for all of them and for no other group at that time on this machine; groups that are
// made one after another may share it. Sub-groups of a launch are jobs of other names and numbers.
struct Job {
  std::string name;
  int rank = 0;
  int num_ranks = 1;
};

// What the launcher says in the environment: RANK, WORLD_SIZE and MASTER_PORT (torchrun),
// OMPI_COMM_WORLD_RANK and _SIZE (Open MPI), PMI_RANK and PMI_SIZE (MPICH); UNIEP_JOB, where set,
// is the name. Nothing without a launcher.
// Errors: invalid_argument for values that are no ranks; world for ranks on several machines.
[[nodiscard]] UNIEP_API std::optional<Job> job_from_environment();

}  // namespace uniep
