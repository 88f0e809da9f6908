// SPDX-License-Identifier: Apache-2.0
// Checks of the device plan that need no more than one launch at a time, so that they run on a GPU
// and in emulation: every array of every rank against the CPU's plan, from poisoned memory.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cuda_host.hpp"
#include "plan_world.hpp"
#include "uniep/error.hpp"

namespace uniep::cuda_test {

using cuda::DevicePlan;
using cuda::PlanArrays;
using cuda::PlanCounts;
using cuda::RankTopk;
using cuda::SymmetricMemory;
using Ids = std::vector<std::vector<std::int32_t>>;

inline constexpr std::chrono::seconds kLongBound{20};

template <typename T>
inline bool equals(const T* device, const std::vector<T>& expected) {
  std::vector<T> values(expected.size());
  if (!values.empty()) {
    UNIEP_CUDA_CHECK(
        cudaMemcpy(values.data(), device, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  }
  return values.empty() ||
         std::memcmp(values.data(), expected.data(), values.size() * sizeof(T)) == 0;
}

template <typename T>
inline void poison(T* device, std::int64_t count) {
  UNIEP_CUDA_CHECK(cudaMemset(device, 0xA5, static_cast<std::size_t>(count) * sizeof(T)));
}

// A group on this GPU with ids in device memory.
class Group {
 public:
  explicit Group(const Routing& routing, std::chrono::nanoseconds bound = kLongBound)
      : routing_(routing),
        shape_{.topk = routing.topk,
               .max_tokens = *std::max_element(routing.tokens.begin(), routing.tokens.end()),
               .tile_m = routing.tile_m,
               .blocks_per_rank = routing.blocks_per_rank},
        memory_(num_ranks(), DevicePlan::bytes_per_rank(shape_, routing.placement), bound),
        plan_(memory_, shape_, routing.placement, routing.tile_orders) {
    UNIEP_CUDA_CHECK(cudaStreamCreate(&stream_));
    for (const std::int64_t tokens : routing.tokens) {
      ids_.push_back(std::make_unique<Buffer<std::int32_t>>(tokens * routing.topk));
      inputs_.push_back({ids_.back()->get(), tokens});
    }
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { cudaStreamDestroy(stream_); }

  [[nodiscard]] int num_ranks() const { return routing_.placement.num_ranks; }
  [[nodiscard]] cudaStream_t stream() const { return stream_; }
  [[nodiscard]] SymmetricMemory& memory() { return memory_; }
  [[nodiscard]] DevicePlan& plan() { return plan_; }
  [[nodiscard]] const std::vector<RankTopk>& inputs() const { return inputs_; }

  void upload(const Ids& ids) const {
    for (std::size_t rank = 0; rank < ids.size(); ++rank) {
      UNIEP_CUDA_CHECK(cudaMemcpy(ids_[rank]->get(), ids[rank].data(), ids[rank].size() * 4,
                                  cudaMemcpyHostToDevice));
    }
  }

  void poison_arrays() const {
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const PlanArrays& out = plan_.arrays(rank);
      const std::int64_t experts = routing_.placement.num_local_experts(rank);
      const std::int64_t choices = shape_.max_tokens * shape_.topk;
      poison(out.expert_rows, experts);
      poison(out.expert_starts, experts + 1);
      poison(out.run_starts, experts * num_ranks());
      poison(out.run_rows, experts * num_ranks());
      poison(out.source_starts, experts * num_ranks());
      poison(out.slots, choices);
      poison(out.first_choices, choices);
      poison(out.owners, choices);
      poison(out.send_order, choices);
      poison(out.send_starts, routing_.placement.num_experts() + 1);
      poison(out.row_sources, plan_.max_rows(rank));
      poison(out.tiles, plan_.max_tiles(rank));
      poison(out.counts, 1);
    }
    UNIEP_CUDA_CHECK(cudaDeviceSynchronize());
  }

  // Plans and checks; empty if all went well.
  std::string run() {
    return error_of([&] {
      plan_.run(inputs_, stream_);
      plan_.check(stream_);
    });
  }

  // The arrays that differ from the CPU's, by name and rank; empty if none.
  [[nodiscard]] std::string differences(const Ids& ids) const {
    std::string text;
    const auto all = expect_plans(routing_, ids);
    for (int rank = 0; rank < num_ranks(); ++rank) {
      const Expected& expected = all[static_cast<std::size_t>(rank)];
      const Plan& plan = expected.plan;
      const PlanArrays& out = plan_.arrays(rank);
      const auto note = [&](bool same, const char* name) {
        if (!same) text += std::string(" ") + name + "@" + std::to_string(rank);
      };
      note(equals(out.expert_rows, plan.expert_rows), "expert_rows");
      note(equals(out.expert_starts, plan.expert_starts), "expert_starts");
      note(equals(out.run_starts, plan.run_starts), "run_starts");
      note(equals(out.run_rows, plan.run_rows), "run_rows");
      note(equals(out.source_starts, plan.source_starts), "source_starts");
      note(equals(out.slots, plan.slots), "slots");
      note(equals(out.first_choices, plan.first_choices), "first_choices");
      note(equals(out.owners, expected.owners), "owners");
      note(equals(out.send_order, plan.send_order), "send_order");
      note(equals(out.send_starts, plan.send_starts), "send_starts");
      note(equals(out.row_sources, expected.row_sources), "row_sources");
      note(equals(out.tiles, expected.tiles), "tiles");
      note(equals(out.counts,
                  std::vector<PlanCounts>{{1, plan.num_rows,
                                           static_cast<std::int64_t>(expected.tiles.size()),
                                           static_cast<std::int64_t>(plan.send_order.size())}}),
           "counts");
    }
    return text;
  }

  template <typename Body>
  static std::string error_of(Body body) {
    try {
      body();
      return "";
    } catch (const Error& error) {
      return (error.code() == ErrorCode::world ? "world: " : "invalid: ") +
             std::string(error.what());
    }
  }

 private:
  const Routing routing_;
  const cuda::PlanShape shape_;
  SymmetricMemory memory_;
  DevicePlan plan_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::unique_ptr<Buffer<std::int32_t>>> ids_;
  std::vector<RankTopk> inputs_;
};

inline std::string title(const Routing& routing) {
  return routing.name + ", R=" + std::to_string(routing.placement.num_ranks) + ", " +
         std::to_string(routing.blocks_per_rank) + " blocks a rank";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline void test_routing(Report& report, const Routing& routing) {
  Group group(routing);
  std::string wrong;
  // Twice with other ids in the same memory, once more with the same.
  for (const std::uint64_t seed : {1, 2, 2}) {
    const Ids ids = make_ids(routing, seed);
    group.upload(ids);
    group.poison_arrays();
    wrong += group.run();
    wrong += group.differences(ids);
  }
  report.check(wrong.empty(), title(routing) + wrong);
}

inline void test_refused_ids(Report& report, const Routing& routing) {
  const int num_experts = routing.placement.num_experts();
  for (const std::int32_t bad : {num_experts, num_experts + 1, -2, 2147483647, -2147483647 - 1}) {
    Group group(routing);
    const Ids good = make_ids(routing, 40);
    Ids ids = good;
    const int rank = group.num_ranks() - 1;
    auto& last = ids[static_cast<std::size_t>(rank)];
    last[static_cast<std::size_t>(7 * routing.topk + 1)] = bad;
    last[static_cast<std::size_t>(20 * routing.topk)] = num_experts + 5;
    last.back() = -7;
    const std::string want = "invalid: topk_ids of rank " + std::to_string(rank) +
                             ", token 7, choice 1 is " + std::to_string(bad) + "; ids are 0 to " +
                             std::to_string(num_experts - 1);
    std::string wrong;
    for (int repeat = 0; repeat < 3; ++repeat) {
      group.upload(ids);
      group.poison_arrays();
      const std::string told = group.run();
      if (!contains(told, want)) wrong += " told '" + told + "'";
      for (int other = 0; other < group.num_ranks(); ++other) {
        const PlanArrays& out = group.plan().arrays(other);
        if (!equals(out.slots, std::vector<std::int64_t>(4, -0x5A5A5A5A5A5A5A5B)) ||
            !equals(out.counts, std::vector<PlanCounts>{{0, 0, 0, 0}})) {
          wrong += " rank " + std::to_string(other) + " wrote a plan";
        }
      }
      group.upload(good);
      wrong += group.run();
      wrong += group.differences(good);
    }
    report.check(wrong.empty(),
                 "id " + std::to_string(bad) + " is refused: " + title(routing) + wrong);
  }
}

// A rank is not launched, so that the others wait for it in vain; all is well after recover.
inline void test_withheld_rank(Report& report, const Routing& routing,
                               std::chrono::milliseconds bound) {
  Group group(routing, bound);
  const Ids ids = make_ids(routing, 50);
  const int last = group.num_ranks() - 1;
  group.upload(ids);
  std::string wrong;
  for (int repeat = 0; repeat < 2; ++repeat) {
    wrong += group.run();  // so that there are signals of an operation before
    const std::span<const RankTopk> all(group.inputs());
    const std::string told = Group::error_of([&] {
      group.plan().run(all.first(all.size() - 1), group.stream());
      group.plan().check(group.stream());
    });
    if (!contains(told, "world: rank ") || !contains(told, "in stage plan, exchange of counts") ||
        !contains(told, "for rank " + std::to_string(last) + ": expected ")) {
      wrong += " told '" + told + "'";
    }
    if (repeat == 0) std::printf("  %s\n", told.c_str());
    // A poisoned group does nothing, and says the same until recover.
    group.poison_arrays();
    if (group.run() != told) wrong += " a poisoned group told something else";
    if (!equals(group.plan().arrays(0).counts,
                std::vector<PlanCounts>(1, {-0x5A5A5A5A5A5A5A5B, -0x5A5A5A5A5A5A5A5B,
                                            -0x5A5A5A5A5A5A5A5B, -0x5A5A5A5A5A5A5A5B}))) {
      wrong += " a poisoned group wrote a plan";
    }
    group.memory().recover();
    wrong += group.run();
    wrong += group.differences(ids);
  }
  report.check(wrong.empty(), "a rank that does not come: " + title(routing) + wrong);
}

inline void test_refusals(Report& report) {
  const auto refused = [&](const char* what, const std::string& want, auto body) {
    const std::string told = Group::error_of(body);
    report.check(contains(told, want), std::string(what) + " is refused: " + told);
  };
  refused("17 ranks", "invalid: 17 ranks", [] { SymmetricMemory memory(17, 4096, kLongBound); });
  refused("no bound", "invalid: a bound of waits of 0 ns",
          [] { SymmetricMemory memory(2, 4096, std::chrono::nanoseconds(0)); });
  const Placement placement = make_contiguous_placement(8, 2);
  const auto make = [&](const cuda::PlanShape& shape, const Placement& map) {
    SymmetricMemory memory(2, 1 << 20, kLongBound);
    DevicePlan plan(memory, shape, map);
  };
  refused("topk of 65", "topk is 65", [&] { make({.topk = 65}, placement); });
  refused("513 experts", "513 experts", [&] { make({}, make_contiguous_placement(513, 2)); });
  refused("33 blocks", "33 blocks per rank", [&] { make({.blocks_per_rank = 33}, placement); });
  refused("3 ranks in memory of 2", "must agree",
          [&] { make({}, make_contiguous_placement(8, 3)); });
  refused("too little memory", "bytes of a rank's symmetric memory",
          [&] { make({.topk = 8, .max_tokens = 1 << 20}, placement); });
  refused("2^31 rows", "tokens per rank",
          [&] { make({.topk = 64, .max_tokens = 1 << 24}, placement); });
  refused("blocks that cannot be resident together", "resident at once", [&] {
    Routing routing = bench_routing(16, 32);
    Group group(routing);
    group.plan().run(group.inputs(), group.stream());
  });
}

}  // namespace uniep::cuda_test
