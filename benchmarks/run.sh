#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs every CPU benchmark of a build folder, one after the other.
#   benchmarks/run.sh build/bench
set -eu
for name in bench_gemm_cpu bench_plan bench_fused bench_trace; do
  echo "== $name"
  "$1/benchmarks/$name"
done
