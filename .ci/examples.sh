#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the release build into a folder of its own and uses it as others would: a CMake project
# through find_package, a single compile line through pkg-config.
set -eu
prefix=$PWD/build/installed
rm -rf "$prefix" build/examples
cmake --install build/release --prefix "$prefix" >/dev/null
cmake -S examples -B build/examples -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build build/examples -j "$1"
"$prefix/bin/uniep" --version
"$prefix/bin/uniep" case --shape tiny --seed 3 -o build/examples/case.safetensors
build/examples/01_layer
build/examples/02_replay build/examples/case.safetensors
build/examples/03_layer
# As a launcher would start it; the ranks' sums must add up to that of one rank.
build/examples/04_processes >build/examples/sum-1.txt
for rank in 0 1 2; do
  RANK=$rank WORLD_SIZE=3 UNIEP_JOB="examples $$" build/examples/04_processes \
    >build/examples/sum-3-$rank.txt &
done
wait
cat build/examples/sum-1.txt build/examples/sum-3-?.txt
python3 - build/examples/sum-1.txt build/examples/sum-3-?.txt <<'PY'
import sys
one, *three = (float(open(path).read().split("sum")[1]) for path in sys.argv[1:])
assert len(three) == 3 and sum(three) == one, (one, three)
PY

libdir=$(dirname "$(find "$prefix" -name uniep.pc)")
# shellcheck disable=SC2046
g++ -std=c++20 -O2 examples/01_layer.cpp -o build/examples/01_layer_pkg_config \
  $(PKG_CONFIG_PATH="$libdir" pkg-config --cflags --libs uniep) -pthread \
  -Wl,-rpath,"$(dirname "$libdir")"
build/examples/01_layer_pkg_config
# shellcheck disable=SC2046
gcc -std=c11 -Wall -Wextra -pedantic -Werror examples/03_layer.c \
  -o build/examples/03_layer_pkg_config \
  $(PKG_CONFIG_PATH="$libdir" pkg-config --cflags --libs uniep) -Wl,-rpath,"$(dirname "$libdir")"
build/examples/03_layer_pkg_config
soname=$(readelf -d "$(dirname "$libdir")/libuniep.so" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
echo "SONAME $soname"
case "$soname" in libuniep.so.*) ;; *) echo "libuniep.so has no versioned SONAME"; exit 1 ;; esac
# Hidden means hidden: nothing of the inner namespaces is exported.
if nm -DC --defined-only "$(dirname "$libdir")/libuniep.so" | grep -E ' uniep::(cpu|tools)::'; then
  echo "libuniep.so exports inner symbols"
  exit 1
fi
