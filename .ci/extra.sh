#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What `make test` leaves out because it takes longer. Argument: parallel compile jobs.
set -eu
jobs=${1:-2}
step=.ci/step

$step "format" .ci/format.sh --check

if command -v nvcc >/dev/null 2>&1; then
  $step "cuda: configure" cmake --preset cuda -G Ninja
  $step "cuda: build" cmake --build build/cuda -j "$jobs" \
    --target uniep_cuda probe_wgmma_bits test_grouped_gemm_cuda test_plan_cuda
else
  echo "== cuda: skipped, nvcc is not on PATH"
fi

# Tests named *Soak* are for make nightly; under a sanitizer a thread costs ten times its time.
$step "asan: configure" cmake --preset asan -G Ninja
$step "asan: build" cmake --build build/asan --target uniep_tests -j "$jobs"
$step "asan: tests" env UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  build/asan/uniep_tests --gtest_brief=1

$step "tsan: configure" cmake --preset tsan -G Ninja
$step "tsan: build" cmake --build build/tsan --target uniep_tests uniep -j "$jobs"
$step "tsan: verify" env TSAN_OPTIONS=halt_on_error=1 build/tsan/uniep verify --shape tiny \
  --ranks 1,2,4 --schedules 6 --routing zipf:1.2
# Without rows nothing but the signals between operations orders the ranks.
$step "tsan: verify, all masked" env TSAN_OPTIONS=halt_on_error=1 build/tsan/uniep verify \
  --shape tiny --mask 1 --ranks 3 --schedules 8
$step "tsan: tests" env TSAN_OPTIONS=halt_on_error=1 build/tsan/uniep_tests --gtest_brief=1 \
  --gtest_filter="$(cat .ci/tsan_tests)"

[ -x build/release/uniep ] || $step "release" make test
$step "install and examples" .ci/examples.sh "$jobs"
