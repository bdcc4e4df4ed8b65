#!/usr/bin/env bash
# On a machine with one GPU, from the repository root. $1: where logs go. Environment: SITE, a folder with
# packages that the machine lacks (tomli-w, pytest-timeout); TINY, the tinyimagenet25 shards.
# $2 picks the parts: tests, quickstart, tiny, throughput (default: all).
set -uo pipefail
out=$1; parts=${2:-tests quickstart tiny throughput}; here=records/2026-11-15_foundation_h200
export PYTHONPATH=$PWD/src:$PWD/tests:${SITE:-} PYTHONUNBUFFERED=1
mkdir -p "$out/logs"
paceline() { python3 -m paceline "$@"; }
say() { echo; echo "=== $*"; "$@"; echo "=== exit code $?"; }
wants() { [[ " $parts " == *" $1 "* ]]; }
{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; python3 -V
  python3 -c 'import torch, torchvision; print("torch", torch.__version__, "torchvision", torchvision.__version__)'; } > "$out/logs/environment.txt" 2>&1
if wants throughput; then
  { for turn in 1 2; do
      say python3 $here/plain_resnet50.py
      for workers in 2 4 14; do
        say paceline train imagenet-resnet50 --set data.source=synthetic --set data.augment=none --set data.synthetic_samples=12800 --global-batch-size 256 --epochs 1 --workers $workers --log-interval 25 --output "$out/resnet50-$workers-$turn"
      done
    done
    say paceline train imagenet-alexnet --set data.source=synthetic --set data.augment=none --set data.synthetic_samples=5120 --global-batch-size 65536 --epochs 13 -b 512 --workers 4 --output "$out/alexnet64k"
  } > "$out/logs/throughput.log" 2>&1
fi
if wants quickstart; then
  { say paceline doctor --output "$out"
    say paceline train --log-interval 94 --output "$out/quickstart"
    say python3 -m torch.distributed.run --nproc-per-node 1 -m paceline train --epochs 3 --log-interval 94 --output "$out/nccl1"
    say paceline train --nproc-per-node 2 --set comm.backend=gloo --epochs 3 --log-interval 94 --output "$out/gloo2"
    say paceline train --nproc-per-node 2 --epochs 3 --output "$out/refused"
  } > "$out/logs/quickstart.log" 2>&1
fi
if wants tests; then
  ignored=$(grep -rlE "hypothesis|import yaml" tests --include='test_*.py' | sed 's/^/--ignore=/')
  say timeout 330 python3 -m pytest tests -q --maxfail=15 -p no:cacheprovider $ignored > "$out/logs/tests.log" 2>&1
fi
if wants tiny; then
  { say paceline train --data-dir "$TINY" --model resnet18 --set model.stem=small --set data.image_size=64 --set data.eval_resize=0 --set data.augment=random_resized_crop --set 'data.crop_scale=[0.35,1.0]' --epochs 30 --global-batch-size 128 --lr 0.1 --weight-decay 5e-4 --warmup-epochs 3 --workers 14 --log-interval 98 --output "$out/tiny"
    say paceline eval "$out/tiny" --json
    say paceline export "$out/tiny" "$out/tiny.safetensors"
  } > "$out/logs/tinyimagenet25.log" 2>&1
fi
for run in "$out"/*/summary.json; do cp "$run" "$out/logs/summary-$(basename "$(dirname "$run")").json"; done
tar -C "$out" -czf "$out/logs.tar.gz" logs
find "$out" -mindepth 1 -maxdepth 1 ! -name logs.tar.gz -exec rm -rf {} +
