// SPDX-License-Identifier: Apache-2.0
// Replaying a case: reads the tensors of a suspicious step, runs them with several schedules and
// rank counts, and tells which rows of the output are not finite.
//
//   uniep case --shape tiny -o case.safetensors && 02_replay case.safetensors
#include <cmath>
#include <cstdio>
#include <cstring>
#include <uniep/bf16.hpp>
#include <uniep/case.hpp>
#include <uniep/error.hpp>

namespace {

double value_at(const uniep::Case& data, const std::vector<std::byte>& tensor, std::size_t i) {
  if (data.dtype == uniep::DType::bf16) {
    uniep::Bf16 value;
    std::memcpy(&value, tensor.data() + i * sizeof value, sizeof value);
    return uniep::to_float(value);
  }
  float value = 0;
  std::memcpy(&value, tensor.data() + i * sizeof value, sizeof value);
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: 02_replay CASE.safetensors\n");
    return 2;
  }
  try {
    const uniep::Case data = uniep::load_case(argv[1]);
    uniep::RunOptions options;
    options.backward = data.d_out.has_value();
    const uniep::CaseResult first = uniep::run_case(data, options);

    const auto hidden = static_cast<std::size_t>(data.hidden);
    std::int64_t bad_rows = 0;
    for (std::size_t token = 0; token < static_cast<std::size_t>(data.num_tokens); ++token) {
      std::size_t bad = 0;
      for (std::size_t i = 0; i < hidden; ++i) {
        if (!std::isfinite(value_at(data, first.out, token * hidden + i))) ++bad;
      }
      if (bad == 0) continue;
      if (++bad_rows <= 10) std::printf("out[%zu]: %zu values are not finite\n", token, bad);
    }
    std::printf("%lld of %lld rows are not finite\n", static_cast<long long>(bad_rows),
                static_cast<long long>(data.num_tokens));

    for (const int ranks : {2, 3, 4}) {
      for (std::uint64_t i = 0; i < 4; ++i) {
        options.num_ranks = ranks;
        options.schedule = uniep::sample_schedule(1, i);
        const uniep::CaseResult again = uniep::run_case(data, options);
        if (again.out != first.out || again.d_x != first.d_x) {
          std::printf("%d ranks, %s: other bits\n", ranks,
                      uniep::to_string(options.schedule).c_str());
          return 1;
        }
      }
    }
    std::printf("2, 3 and 4 ranks, 4 schedules each: the same bits\n");
    return 0;
  } catch (const uniep::Error& error) {
    std::fprintf(stderr, "02_replay: %s\n", error.what());
    return error.code() == uniep::ErrorCode::invalid_argument ? 2 : 3;
  }
}
