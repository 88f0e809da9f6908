# SPDX-License-Identifier: Apache-2.0
# The commands people type. CMake does the building: see CMakePresets.json.
#   make demo      build, run the layer on a sample case, prove its bits, train a language model
#   make test      release build and all tests
#   make ci-extra  sanitizers, CUDA build where nvcc is found, install, examples, format
#   make bench     CPU benchmarks, as ratios within one run
#   make nightly   long fuzzing, mutants, clang-tidy
.PHONY: all build demo test ci-extra bench nightly clean
.DEFAULT_GOAL := build
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
STEP := .ci/step
UNIEP := build/release/uniep

build:
	@.ci/packages.sh build
	@$(STEP) "configure" cmake --preset release -G Ninja
	@$(STEP) "build" cmake --build build/release --target uniep -j $(JOBS)

all:
	@.ci/packages.sh build
	@$(STEP) "configure" cmake --preset release -G Ninja
	@$(STEP) "build" cmake --build build/release -j $(JOBS)

demo: build
	@.ci/demo.sh $(UNIEP)

test: all
	@$(STEP) "tests" ctest --test-dir build/release --output-on-failure --no-tests=error

ci-extra:
	@.ci/packages.sh extra
	@.ci/extra.sh $(JOBS)

bench:
	@.ci/packages.sh bench
	@cmake --preset bench -G Ninja
	@cmake --build build/bench -j $(JOBS)
	@benchmarks/run.sh build/bench

nightly:
	@.ci/packages.sh nightly
	@.ci/nightly.sh $(JOBS)

clean:
	rm -rf build demo
