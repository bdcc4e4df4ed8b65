#!/usr/bin/env bash
# Every max-autotune peer: compile first, as long as it takes, then time on a GPU that does nothing else.
# In the record the compilations ran in the background of other work; on a quiet GPU they are the better peers.
set -eu
OUT=${1:?folder for results}
mkdir -p "$OUT"
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$OUT/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$OUT/triton}
fp16="plain fp16 max-autotune" bf16="plain bf16 max-autotune" overhead="plain fp16 reduce-overhead"
step() { paceline bench step "$@" --json; }
for what in "-b 512" "-b 256" "--model alexnet_bn -b 512"; do
  for row in "$fp16" "$bf16"; do
    step $what --row "$row" --steps 3 --warm-up 3 --row-limit-s 1700 > /dev/null # only for the caches
  done
done
step -b 512 --row ours --row "$fp16" --row "$bf16" --row "$overhead" --together 5 --row-limit-s 120 > "$OUT/step-512.json"
# "ours N>1": in the record's `step-256` it was a lone rank's single buffer; since 8987736 it is the plan of many ranks.
step -b 256 --row ours --row "ours N>1" --row "$fp16" --row "$bf16" --row "$overhead" --together 5 --row-limit-s 120 > "$OUT/step-256.json"
step -b 256 --row "$bf16" --row ours --together 2 --steps 150 > "$OUT/step-256-again.json"
step --model alexnet_bn -b 512 --row ours --row "$fp16" --row "$bf16" --row "$overhead" --together 5 --row-limit-s 120 > "$OUT/step-alex.json"
paceline bench optimizer --json > "$OUT/optimizer.json"
python "$(dirname "$0")/average.py" > "$OUT/average.log"
