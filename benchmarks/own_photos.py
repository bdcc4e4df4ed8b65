"""A practitioner's training of ResNet-18 on class folders for a given time, the peer of `recipe = auto`.

    python -m benchmarks.own_photos --data-dir photos/train --test-dir photos/test --minutes 5

Plain PyTorch: images of 64 pixels, random resized crops and flips, SGD with momentum, a cosine over the
time, and torch's DataLoader. A tenth of each class is held out and evaluated after each epoch; the
accuracy of the last weights on `--test-dir` is computed after the time. Nothing is tuned.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.program import run
from paceline.data.sources.base import validation_indices
from paceline.models import ModelSettings, create_model

_PIXELS, _BATCH, _RATE, _DECAY, _WORKERS = 64, 64, 0.05, 5e-4, 2
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Sample = tuple[Path, int]


def samples_of(folder: Path) -> list[Sample]:
    """Lists the images of class folders; the number of a class is its place in the sorted names."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(file, n) for n, path in enumerate(classes) for file in sorted(path.iterdir())]


class Photos(Dataset[tuple[Tensor, int]]):
    """Photos as normalized tensors: random crops for training, the center for evaluation."""

    def __init__(self, samples: list[Sample], *, train: bool) -> None:
        self._samples, self._train = samples, train

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._samples[index]
        with Image.open(path) as file:
            image = file.convert("RGB")
        box = self._box(*image.size)
        pixels = np.asarray(image.resize((_PIXELS, _PIXELS), Image.Resampling.BILINEAR, box))
        if self._train and random.random() < 0.5:
            pixels = pixels[:, ::-1]
        values = (pixels / 255.0 - np.array(_MEAN)) / np.array(_STD)
        return torch.from_numpy(values.transpose(2, 0, 1).astype(np.float32).copy()), label

    def _box(self, width: int, height: int) -> tuple[float, float, float, float]:
        if not self._train:
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            return left, top, left + side, top + side
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1.0)
            ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if w <= width and h <= height:
                left, top = random.uniform(0, width - w), random.uniform(0, height - h)
                return left, top, left + w, top + h
        return 0.0, 0.0, float(width), float(height)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Returns the top-1 accuracy in percent."""
    model.eval()
    hits = [model(images).argmax(1) == labels for images, labels in batches]
    model.train()
    return 100 * torch.cat(hits).float().mean().item()


def train(data_dir: Path, minutes: float, seed: int) -> tuple[nn.Module, dict[str, float]]:
    """Trains for the given time from the start of this function."""
    started = time.perf_counter()
    random.seed(seed)
    torch.manual_seed(seed)
    samples = samples_of(data_dir)
    labels = np.array([label for _, label in samples])
    held_out = set(validation_indices(labels, 0.1).tolist())
    kept = [sample for i, sample in enumerate(samples) if i not in held_out]
    loader = DataLoader(
        Photos(kept, train=True), _BATCH, shuffle=True, num_workers=_WORKERS, drop_last=True,
        persistent_workers=True,
    )  # fmt: skip
    validation = DataLoader(Photos([samples[i] for i in sorted(held_out)], train=False), 256)
    settings = ModelSettings(name="resnet18", stem="imagenet", zero_init_gamma=False)
    model = create_model(settings, num_classes=int(labels.max()) + 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, weight_decay=_DECAY)
    epochs, top1, limit_s = 0, 0.0, 60 * minutes
    while (spent_s := time.perf_counter() - started) < limit_s:
        for images, targets in loader:
            spent_s = time.perf_counter() - started
            if spent_s >= limit_s:
                break
            rate = 0.5 * _RATE * (1 + math.cos(math.pi * spent_s / limit_s))
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        else:
            epochs += 1
            top1 = accuracy(model, validation)
    return model, {
        "epochs": epochs, "validation_top1": top1, "seconds": time.perf_counter() - started
    }  # fmt: skip


def main(
    data_dir: Path = typer.Option(..., help="Class folders."),
    test_dir: Path = typer.Option(..., help="Class folders for the reported accuracy."),
    minutes: float = typer.Option(5.0, help="Time for the training."),
    seed: int = typer.Option(0),
) -> None:
    """Trains and prints one line of JSON."""
    model, found = train(data_dir, minutes, seed)
    test = DataLoader(Photos(samples_of(test_dir), train=False), 256, num_workers=_WORKERS)
    found["test_top1"] = accuracy(model, test)
    sys.stdout.write(json.dumps({"data": str(data_dir), "seed": seed, **found}) + "\n")


if __name__ == "__main__":
    run(main)
