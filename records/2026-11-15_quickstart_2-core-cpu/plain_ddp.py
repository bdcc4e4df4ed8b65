"""The peer of this record: what a careful user writes by hand in plain PyTorch.

DistributedDataParallel, torch DataLoader with Pillow, momentum SGD, warm-up and cosine; the same network,
images, augmentation, batch and schedule as `paceline train quickstart`. Start it with torchrun.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from paceline.models.roles import parameter_groups
from paceline.models.small_resnet import SmallResNet
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline.data

EMBEDDED = Path(paceline.data.__file__).parent / "embedded"


class Shards(Dataset):
    """All samples in memory, decoded with Pillow when they are asked for."""

    def __init__(self, split: str, train: bool) -> None:
        self.train, images, labels = train, {}, {}
        for path in sorted(EMBEDDED.glob(f"{split}-*.tar.gz")):
            with tarfile.open(path) as tar:
                for member in tar:
                    key, _, kind = member.name.partition(".")
                    content = tar.extractfile(member).read()
                    (images if kind == "png" else labels)[f"{path.name}/{key}"] = content
        self.samples = [(images[key], int(labels[key])) for key in sorted(images)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        content, label = self.samples[index]
        pixels = np.asarray(Image.open(io.BytesIO(content)), dtype=np.float32) / 255
        if self.train:
            y, x = np.random.randint(0, 5, 2)
            pixels = np.pad(pixels, 2)[y : y + 28, x : x + 28]
            if np.random.rand() < 0.5:
                pixels = pixels[:, ::-1]
        pixels = (pixels - 0.286) / 0.353
        return torch.from_numpy(np.ascontiguousarray(pixels))[None], label


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--global-batch-size", type=int, default=128)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    torch.manual_seed(arguments.seed)
    np.random.seed(arguments.seed * 100 + rank)
    model = SmallResNet().to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    train, val = Shards("train", True), Shards("val", False)
    sampler = DistributedSampler(train, world, rank, seed=arguments.seed, drop_last=True)
    batch = arguments.global_batch_size // world
    loader = DataLoader(
        train, batch, sampler=sampler, num_workers=1, drop_last=True, persistent_workers=True
    )
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-4), lr=0.2, momentum=0.9)
    total = arguments.epochs * len(loader)
    warm = 3 * len(loader)
    started, step, busy_s, images = time.perf_counter(), 0, 0.0, 0
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        epoch_started = time.perf_counter()
        for pixels, labels in loader:
            rate = (
                0.2 * (step + 1) / warm
                if step < warm
                else (0.1 * (1 + math.cos(math.pi * (step - warm) / (total - warm))))
            )
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            outputs = ddp(pixels.to(memory_format=torch.channels_last))
            F.cross_entropy(outputs, labels, label_smoothing=0.1).backward()
            optimizer.step()
            step += 1
            images += len(labels) * world
        busy_s += time.perf_counter() - epoch_started
        model.eval()
        with torch.inference_mode():
            correct = torch.zeros(1)
            for pixels, labels in DataLoader(val, 256):
                correct += (model(pixels).argmax(1) == labels).sum()
        if rank == 0:
            print(f"epoch {epoch + 1} top1 {100 * correct.item() / len(val):.2f}", flush=True)
    if rank == 0:
        result = {
            "top1": 100 * correct.item() / len(val), "images_per_s": images / busy_s,
            "train_s": time.perf_counter() - started, "world_size": world, "seed": arguments.seed,
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
