#!/usr/bin/env bash
# Six steps an epoch on the embedded images: LARS against Muon. From the project's root, after `make train` has set up:
#     bash records/2026-11-16_few-steps_2-core-cpu/run.sh OUTPUT [NAME …]
# A run takes two to five minutes on one core; one whose summary is there is done. NAMEs choose among the runs.
set -euo pipefail
output=$1
shift
while read -r name optimizer rate eta momentum warm seed more; do
    [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
    [ -e "$output/$name/summary.json" ] && continue
    mkdir -p "$output"
    # shellcheck disable=SC2086 # settings beyond the columns are words of their own
    .venv/bin/paceline train quickstart --device cpu --set run.threads=1 --epochs 15 -b 250 \
        --global-batch-size 2000 --opt "$optimizer" --lr "$rate" --set "optim.trust_coefficient=$eta" \
        --momentum "$momentum" --set optim.nesterov=true --warmup-epochs "$warm" --seed "$seed" $more \
        --output "$output/$name" < /dev/null > "$output/$name.log" 2>&1
    echo "$name $(grep -o '"top1": [0-9.]*' "$output/$name/summary.json")"
done <<'RUNS'
lars-1-0.01 lars 1 0.01 0.9 3 0
lars-1-0.02 lars 1 0.02 0.9 3 0
lars-2-0.01 lars 2 0.01 0.9 3 0
lars-2-0.02 lars 2 0.02 0.9 3 0
lars-4-0.005 lars 4 0.005 0.9 3 0
lars-4-0.005-warm1 lars 4 0.005 0.9 1 0
lars-4-0.01 lars 4 0.01 0.9 3 0
lars-8-0.0025 lars 8 0.0025 0.9 3 0
muon-0.3-0.0333 muon 0.3 0.0333 0.9 1 0
muon-1-0.005 muon 1 0.005 0.9 1 0
muon-1-0.01 muon 1 0.01 0.9 1 0
muon-1-0.02 muon 1 0.02 0.9 1 0
muon-1-0.04-momentum0.6 muon 1 0.04 0.6 1 0
muon-1-0.01-all muon 1 0.01 0.9 1 0 --set optim.orthogonal=all
muon-2-0.005 muon 2 0.005 0.9 1 0
muon-2-0.01 muon 2 0.01 0.9 1 0
lars-seed-1 lars 8 0.0025 0.9 3 1
lars-seed-2 lars 8 0.0025 0.9 3 2
lars-seed-3 lars 8 0.0025 0.9 3 3
muon-seed-1 muon 1 0.01 0.9 1 1
muon-seed-2 muon 1 0.01 0.9 1 2
muon-seed-3 muon 1 0.01 0.9 1 3
muon-128-0.0125 muon 0.2 0.00625 0.9 1 0 --global-batch-size 128 -b 128
muon-128-0.025 muon 0.2 0.0125 0.9 1 0 --global-batch-size 128 -b 128
muon-128-0.05 muon 0.2 0.025 0.9 1 0 --global-batch-size 128 -b 128
muon-128-seed-1 muon 0.2 0.0125 0.9 1 1 --global-batch-size 128 -b 128
muon-128-seed-2 muon 0.2 0.0125 0.9 1 2 --global-batch-size 128 -b 128
muon-128-seed-3 muon 0.2 0.0125 0.9 1 3 --global-batch-size 128 -b 128
RUNS
