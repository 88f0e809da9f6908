// SPDX-License-Identifier: Apache-2.0
// The answers of a build with CUDA, and of the emulated program.
#include "cuda/backend.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cuda/device.hpp"

namespace uniep::tools {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string driver_text() {
  std::string version;
  if (std::ifstream file("/sys/module/nvidia/version"); file >> version) return version;
  int cuda_version = 0;
  if (cudaDriverGetVersion(&cuda_version) != cudaSuccess) return "unknown";
  return "for CUDA " + version_text(cuda_version);
}

// What a child process saw, once asked.
std::optional<CudaFacts>& facts_of_child() {
  static std::optional<CudaFacts> facts;
  return facts;
}

CudaFacts look() {
  CudaFacts facts;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    facts.missing = fmt::format("no NVIDIA GPU can be used on this machine (CUDA says: {})",
                                error == cudaSuccess ? "no device" : cudaGetErrorString(error));
    return facts;
  }
  int device = 0;
  int runtime = 0;
  cudaDeviceProp properties{};
  error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) error = cudaRuntimeGetVersion(&runtime);
  if (error != cudaSuccess) {
    facts.missing = fmt::format("the GPU cannot be asked what it is (CUDA says: {})",
                                cudaGetErrorString(error));
    return facts;
  }
  facts.gpu = properties.name;
  facts.capability = fmt::format("{}.{}", properties.major, properties.minor);
  facts.driver = driver_text();
  facts.runtime = version_text(runtime);
  facts.sms = properties.multiProcessorCount;
  facts.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  facts.is_emulated = kIsEmulated;
  // A Hopper SM adds and multiplies 2048 pairs in a cycle.
  constexpr double kFlopsOfCycle = 4096;
  int khz = 0;
  if (cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, device) == cudaSuccess) {
    facts.peak_tflops = kFlopsOfCycle * facts.sms * khz * 1e3 / 1e12;
  }
  if (properties.major != 9 || properties.minor != 0) {
    facts.missing =
        fmt::format("this GPU is {} with compute capability {}; the kernels need 9.0 (Hopper)",
                    facts.gpu, facts.capability);
  }
  return facts;
}

// To and from a pipe.
nlohmann::json to_json(const CudaFacts& facts) {
  return {{"missing", facts.missing},           {"gpu", facts.gpu},
          {"capability", facts.capability},     {"driver", facts.driver},
          {"runtime", facts.runtime},           {"sms", facts.sms},
          {"memory_bytes", facts.memory_bytes}, {"peak_tflops", facts.peak_tflops},
          {"is_emulated", facts.is_emulated}};
}

CudaFacts from_json(const nlohmann::json& json) {
  return {.missing = json.at("missing"),
          .gpu = json.at("gpu"),
          .capability = json.at("capability"),
          .driver = json.at("driver"),
          .runtime = json.at("runtime"),
          .sms = json.at("sms"),
          .memory_bytes = json.at("memory_bytes"),
          .peak_tflops = json.at("peak_tflops"),
          .is_emulated = json.at("is_emulated")};
}

}  // namespace

CudaFacts cuda_facts() { return facts_of_child() ? *facts_of_child() : look(); }

void ask_facts_in_child() {
  if (facts_of_child()) return;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_world("the system refused a pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = to_json(look()).dump();
    const bool is_written =
        ::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    std::_Exit(is_written ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text;
  char buffer[4096];
  ssize_t count = 0;
  while (child > 0 && ((count = ::read(ends[0], buffer, sizeof buffer)) > 0 || errno == EINTR)) {
    if (count > 0) text.append(buffer, static_cast<std::size_t>(count));
  }
  ::close(ends[0]);
  if (child > 0) ::waitpid(child, nullptr, 0);
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded()) {
    throw_world("the process that asks for the GPU did not answer; does the driver work?");
  }
  facts_of_child() = from_json(json);
}

void require_cuda() {
  const CudaFacts facts = cuda_facts();
  if (!facts.missing.empty()) throw_world("--backend cuda cannot run here: {}", facts.missing);
}

CudaSchedule resolve(const CudaSchedule& schedule, int ranks_of_launch) {
  CudaSchedule resolved = schedule;
  // An SM holds a block of each moving kernel, whatever its size.
  if (schedule.blocks == 0) {
    resolved.blocks = std::clamp(cuda_facts().sms / std::max(1, ranks_of_launch), 1, 16);
  }
  return resolved;
}

bool can_fuse(DType dtype, int ranks_of_launch) {
  return dtype == DType::bf16 && !kIsEmulated && ranks_of_launch <= cuda::kMaxFusedRanks;
}

CudaRunOptions to_run_options(const Case& data, const CudaOptions& o) {
  const CudaSchedule s = resolve(o.schedule, ranks_of_launch(o));
  const bool has_tensor_cores = data.dtype == DType::bf16 && !kIsEmulated;
  return {.num_ranks = o.num_ranks,
          .schedule = {.fusion = s.fusion,
                       .payload = s.payload,
                       .dispatch = s.dispatch,
                       .combine = s.combine,
                       .blocks_per_rank = s.blocks,
                       .push_warps = s.push_warps,
                       .chunk = s.chunk,
                       .num_sms = s.sms},
          .gemm = has_tensor_cores ? cuda::GemmEngine::tensor_cores : cuda::GemmEngine::fma,
          .backward = o.backward,
          .repeats = o.repeats,
          .wait_bound = o.wait_bound,
          .processes = o.processes,
          .job = o.job};
}

CaseResult run_case_on_gpu(const Case& data, const CudaOptions& options) {
  return run_case_cuda(data, to_run_options(data, options));
}

std::int64_t symmetric_bytes(const Case& data, const CudaOptions& options) {
  const CudaRunOptions run = to_run_options(data, options);
  const Placement placement =
      make_contiguous_placement(static_cast<int>(data.num_experts), run.num_ranks);
  return run.num_ranks *
         cuda::SplitLayer::bytes_per_rank(layer_shape_of(data, run.num_ranks, run.gemm),
                                          run.schedule, placement);
}

}  // namespace uniep::tools
