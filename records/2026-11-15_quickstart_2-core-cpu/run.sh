#!/usr/bin/env bash
# Ours and the peer in turn, three seeds each on one process, one seed each on two. From the repository root.
set -euo pipefail
here=records/2026-11-15_quickstart_2-core-cpu
out=$(mktemp -d)
python=.venv/bin/python
for seed in 0 1 2; do
  $python -m paceline train --seed $seed --log-interval 94 --output "$out/one-$seed" | tee "$here/paceline-1-rank-seed-$seed.log"
  $python -m torch.distributed.run --nproc-per-node 1 $here/plain_ddp.py --seed $seed 2>&1 | tee "$here/plain-1-rank-seed-$seed.log"
done
$python -m paceline train --nproc-per-node 2 --log-interval 94 --output "$out/two" | tee "$here/paceline-2-ranks.log"
$python -m torch.distributed.run --nproc-per-node 2 $here/plain_ddp.py 2>&1 | tee "$here/plain-2-ranks.log"
for run in one-0 one-1 one-2 two; do cp "$out/$run/summary.json" "$here/summary-$run.json"; done
cp "$out/one-0/config.toml" "$here/config.toml"
