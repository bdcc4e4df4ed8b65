#!/usr/bin/env bash
# On the GPU machine, from the repository root: tests, then small real runs. Results under the folder $1.
set -uo pipefail
out=$1; here=records/2026-11-15_foundation_h200
export PYTHONPATH=$PWD/src:$PWD/tests:$PWD/.carry/site PYTHONUNBUFFERED=1
mkdir -p "$out/logs"
{ nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv; python3 -V
  python3 -c 'import torch, torchvision; print("torch", torch.__version__, "torchvision", torchvision.__version__)'; } > "$out/logs/environment.txt" 2>&1
ignored=$(grep -rlE "hypothesis|import yaml" tests --include='*.py' | sed 's/^/--ignore=/')
say() { echo; echo "=== $*"; "$@"; echo "=== exit code $?"; }
{ say timeout 200 python3 -m pytest tests/models tests/data tests/comm tests/train tests/core tests/report tests/optim tests/precision -q -x --maxfail=15 -p no:cacheprovider $ignored; } > "$out/logs/tests.log" 2>&1
{ say python3 -m paceline doctor --data-dir .carry/tinyimagenet25 --output "$out"
  say python3 -m paceline train --log-interval 94 --output "$out/quickstart"
  say python3 -m torch.distributed.run --nproc-per-node 1 -m paceline train --epochs 3 --log-interval 94 --output "$out/nccl1"
  say python3 -m paceline train --nproc-per-node 2 --set comm.backend=gloo --epochs 3 --log-interval 94 --output "$out/gloo2"
  say python3 -m paceline train --nproc-per-node 2 --epochs 3 --output "$out/refused"
} > "$out/logs/quickstart.log" 2>&1
{ say python3 -m paceline train --data-dir .carry/tinyimagenet25 --model resnet18 --set model.stem=small --set data.image_size=64 --set data.eval_resize=0 --set data.augment=random_resized_crop --set 'data.crop_scale=[0.35,1.0]' --epochs 30 --global-batch-size 128 --lr 0.1 --weight-decay 5e-4 --warmup-epochs 3 --workers 14 --log-interval 98 --output "$out/tiny"
  say python3 -m paceline eval "$out/tiny" --json
  say python3 -m paceline export "$out/tiny" "$out/tiny.safetensors"
} > "$out/logs/tinyimagenet25.log" 2>&1
{ for turn in 1 2; do
  say python3 -m paceline train imagenet-resnet50 --set data.source=synthetic --set data.augment=none --set data.synthetic_samples=12800 --global-batch-size 256 --epochs 1 --workers 14 --log-interval 10 --output "$out/resnet50-$turn"
  say python3 $here/plain_resnet50.py
done
  say python3 -m paceline train imagenet-alexnet --set data.source=synthetic --set data.augment=none --set data.synthetic_samples=5120 --global-batch-size 65536 --epochs 13 -b 512 --workers 14 --output "$out/alexnet64k"
} > "$out/logs/throughput.log" 2>&1
for run in quickstart nccl1 gloo2 tiny resnet50-1 resnet50-2 alexnet64k; do cp "$out/$run/summary.json" "$out/logs/summary-$run.json"; done
cp "$out/tiny/report.html" "$out/logs/tiny-report.html"
tar -C "$out" -czf "$out/logs.tar.gz" logs
find "$out" -mindepth 1 -maxdepth 1 ! -name logs.tar.gz -exec rm -rf {} +
