#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes sure that the Debian packages named after `--` are there: installs what is missing when run
# as root, otherwise prints the command that does. Prints nothing where all are there.
#   .ci/packages.sh build|extra|bench
set -eu

build="g++ make cmake ninja-build pkg-config python3 libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev"
case "${1:-build}" in
  build) packages=$build ;;
  extra) packages="$build clang-format-14 git" ;;
  bench) packages="$build libdnnl-dev ocl-icd-opencl-dev" ;;
  nightly) packages="$build clang-tidy-16 git" ;;
  *) echo "usage: .ci/packages.sh [build|extra|bench|nightly]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null 2>&1; then
  echo "uniep: no dpkg here; make sure that the equivalents of these are installed: $packages" >&2
  exit 0
fi
missing=""
for package in $packages; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then
  echo "uniep: installing$missing" >&2
  # An index that cannot be refreshed may still hold these packages: only the install must succeed.
  apt-get update -qq >&2 || true
  # shellcheck disable=SC2086
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2
else
  echo "uniep: these packages are missing; install them and try again:" >&2
  echo "  sudo apt-get install -y --no-install-recommends$missing" >&2
  exit 1
fi
