#!/usr/bin/env bash
# Five steps an epoch, 100 in all, on CIFAR-10 in DIR (as published): bash cifar.sh DIR OUTPUT, from the project's root. Half an hour a run on one core.
set -euo pipefail
data=$1 output=$2
run() {
    name=$1 recipe=$2
    shift 2
    [ -e "$output/$name/summary.json" ] || .venv/bin/paceline train "$recipe" --data-dir "$data" --model resnet_tiny --device cpu \
        --set run.threads=1 --set data.workers=1 --epochs 20 --set data.cutout=0 --set run.cutmix=0 "$@" --output "$output/$name"
}
large() { run "$@" --set run.average_epochs=0 -b 500; }
run cifar-256-sgd cifar10-resnet18
large cifar-10k-lars-0.1 cifar10-resnet18-10k --opt lars --set optim.trust_coefficient=0.0075 --warmup-epochs 6
large cifar-10k-lars-0.2 cifar10-resnet18-10k --opt lars --set optim.lr_base=0.2 --set optim.trust_coefficient=0.005 --warmup-epochs 6
large cifar-10k-muon cifar10-resnet18-10k --opt muon --set optim.trust_coefficient=0.00256 --warmup-epochs 2
