#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The demonstration: a sample case, the layer forward and backward on it, the proof of its bits, and
# a language model that learns, with the same losses on any ranks.
#   .ci/demo.sh path/to/uniep
set -eu
uniep=$1
mkdir -p demo
case_file=demo/case.safetensors
show() {
  echo
  echo "\$ uniep $*"
  "$uniep" "$@"
}
show info
show case --shape tiny --routing zipf:1.2 --seed 1 -o $case_file
for ranks in 1 2 4; do
  show run $case_file --ranks $ranks --backward -o demo/out-$ranks.safetensors
done
echo
echo "The three outputs, byte for byte:"
cmp demo/out-1.safetensors demo/out-2.safetensors
cmp demo/out-1.safetensors demo/out-4.safetensors
echo "equal"
show verify --shape tiny --ranks 1,2,4,8 --schedules 50 --routing zipf:1.2
show trace --shape tiny --ranks 4 -o demo/trace.json --svg demo/trace.svg
show train --ranks 4
show train --steps 40 --report-every 40 --ranks 1 >demo/train-1.txt
show train --steps 40 --report-every 40 --ranks 4 --schedule fusion=split,payload=choice \
  >demo/train-4.txt
echo
echo "The first 40 steps on 1 rank, and on 4 with another schedule:"
for ranks in 1 4; do
  grep "^loss hash" demo/train-$ranks.txt | tee demo/hash-$ranks.txt
done
cmp demo/hash-1.txt demo/hash-4.txt
echo "equal"
echo
echo "demo/trace.svg shows what every worker did and waited for; so does demo/trace.json in https://ui.perfetto.dev."
