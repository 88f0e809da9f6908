#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Plants each fault of tests/mutants/*.patch in a copy of the tree and runs the command that must
# notice it. Exit code 1: a fault went unnoticed; 2: a patch or the untouched tree does not work.
#   tests/mutants/run.sh [JOBS [NAME…]]
set -euo pipefail
cd "$(dirname "$0")/../.."
jobs=${1:-2}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(tests/mutants/*.patch)
patches=()
for name in "${names[@]}"; do patches+=("tests/mutants/$(basename "$name" .patch).patch"); done
limit=240  # seconds of a command: a fault that makes it hang is noticed too
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
git ls-files -co --exclude-standard -z | tar --null -T - --ignore-failed-read -cf - |
  tar -xf - -C "$work"
cd "$work"

field() { sed -n "s/^$2: //p" "$1" | head -n 1; }
# The program that a patch's command runs.
target_of() { basename "$(field "$1" Run | cut -d ' ' -f 1)"; }
build() { cmake --build "build/$1" --target "${@:2}" -j "$jobs" >build.log 2>&1; }
# The words of Run: are split on purpose; no shell reads them.
run() {
  local words
  read -ra words <<<"$1"
  TSAN_OPTIONS=halt_on_error=1 timeout "$limit" "${words[@]}" >run.log 2>&1
}
give_up() {
  echo "mutants: $1" >&2
  [ ! -s "${2:-}" ] || tail -n 30 "$2" >&2
  exit 2
}

launcher=""
! command -v ccache >/dev/null || launcher=-DCMAKE_CXX_COMPILER_LAUNCHER=ccache
for preset in release tsan; do
  # shellcheck disable=SC2086
  cmake --preset $preset -G Ninja $launcher >build.log 2>&1 || give_up "cmake failed" build.log
  targets=()
  for patch in "${patches[@]}"; do
    [ "$(field "$patch" Build)" != $preset ] || targets+=("$(target_of "$patch")")
  done
  [ ${#targets[@]} -gt 0 ] || continue
  build $preset "${targets[@]}" || give_up "the untouched tree does not build ($preset)" build.log
done
while read -r command; do
  run "$command" || give_up "the untouched tree fails: $command" run.log
done < <(for patch in "${patches[@]}"; do field "$patch" Run; done | sort -u)
echo "the untouched tree passes every command"

survived=0
for patch in "${patches[@]}"; do
  name=$(basename "$patch" .patch)
  preset=$(field "$patch" Build)
  patch -p1 --fuzz=0 --no-backup-if-mismatch -s <"$patch" >patch.log 2>&1 ||
    give_up "$name.patch no longer applies" patch.log
  build "$preset" "$(target_of "$patch")" || give_up "$name does not build" build.log
  status=0
  run "$(field "$patch" Run)" || status=$?
  case $status in
    0) by=SURVIVED && survived=1 ;;
    124) by="caught: still running after $limit s" ;;
    *)
      by=$(grep -m 1 -oE 'ThreadSanitizer: [a-z ]+|a deadlock in an emulated kernel|^FAIL [^,:]+|\[  FAILED  \] [A-Za-z]+[./][A-Za-z0-9_/.]+' \
        run.log | sed 's/\[  FAILED  \] //' | sed 's/ *$//' || true)
      by="caught by ${by:-exit code $status}"
      ;;
  esac
  printf '%-24s %s\n' "$name" "$by"
  patch -p1 -R -s <"$patch"
done
exit $survived
