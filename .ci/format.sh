#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Formats the sources with clang-format 14, or with --check only tells what it would change.
set -eu
mode=-i
[ "${1:-}" = --check ] && mode="--dry-run --Werror"
# shellcheck disable=SC2046,SC2086
clang-format-14 $mode $(git ls-files '*.cpp' '*.hpp' '*.cu' '*.cuh')
