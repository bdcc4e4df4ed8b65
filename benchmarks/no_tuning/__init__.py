"""Accuracy without tuning: Paceline's rule for settings against optimizers with documented defaults.

    python -m benchmarks.no_tuning prepare --data DIR --cifar10 CIFAR --tiny TINY
    python -m benchmarks.no_tuning run --data DIR --out runs.jsonl --workers 2
    python -m benchmarks.no_tuning run --data DIR --out rates.jsonl --opt sgd --rates 0.025,0.1,0.4
    python -m benchmarks.no_tuning table runs.jsonl

Each run is a `pl.Trainer` with the same net, images, augmentation, loss, epochs and warm-up; only the
optimizer and its schedule differ. A finished run is one JSON line. `run` skips runs that the file
already contains.
"""
