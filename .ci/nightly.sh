#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Long checks: fuzzing, mutants that the tests must catch, all of clang-tidy.
set -eu
jobs=${1:-2}
step=.ci/step
make all JOBS="$jobs"
seed=$(date +%Y%m%d)
$step "fuzz, seed $seed" build/release/uniep verify --fuzz --seconds "${FUZZ_SECONDS:-1200}" --seed "$seed"
$step "soak" build/release/uniep_tests --gtest_brief=1 --gtest_filter='Soak.*' \
  --gtest_also_run_disabled_tests
[ ! -x tests/mutants/run.sh ] || $step "mutants" tests/mutants/run.sh "$jobs"
$step "clang-tidy" sh -c "git ls-files 'src/*.cpp' 'tools/*.cpp' |
  xargs -P $jobs -n 1 clang-tidy-16 -p build/release --quiet"
