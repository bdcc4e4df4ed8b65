"""Resident memory over a whole epoch, and the time of a seek, on an index as long as ImageNet's.

In: a number of samples, whose decoding is stubbed: every read gives the same pixels. Out: the process's
resident memory along the epoch, and the seconds from nothing to the first batch of its middle.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.bench.input_table import Tell
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_train_loader
from paceline.data.loader_protocol import TrainBatches
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.class_list import numbered_classes

_CLASSES = 1000
_MARKS = 20


class StubbedImages:
    """Labels and places of `count` samples, as an index of shards holds them; one image for all."""

    def __init__(self, count: int, image_size: int) -> None:
        self.classes = numbered_classes(_CLASSES)
        self.labels: Int64 = np.arange(count, dtype=np.int64) % _CLASSES
        self._offsets: Int64 = np.arange(count, dtype=np.int64) * 110_592
        self._pixels = np.zeros((image_size, image_size, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        return self._pixels

    def name(self, i: int) -> str:
        return f"stub:{self._offsets[i]}"

    def close(self) -> None:
        """Nothing is held."""


def measure_memory(
    samples: int, *, batch_size: int, image_size: int, workers: int, tell: Tell
) -> dict[str, Any]:
    """One epoch of `samples`; memory in MiB, twenty times along the way."""
    settings = DataSettings(
        source="synthetic", image_size=image_size, eval_resize=0, augment="none", flip=False,
        workers=workers, resident="off",
    )  # fmt: skip
    before_mib = resident_mib()
    started = time.perf_counter()
    source = StubbedImages(samples, image_size)
    middle = BatchPlan(samples, 1, batch_size, batch_size, 1).total_steps // 2
    with _loader(source, settings, batch_size, middle) as loader:
        next(loader)
        seek_s = time.perf_counter() - started
    tell(f"seek to step {middle:,}: {seek_s:.2f} s")
    marks: list[float] = []
    done, began = 0, time.perf_counter()
    with _loader(source, settings, batch_size, 0) as loader:
        for batch in loader:
            done += len(batch)
            if done * _MARKS >= samples * (len(marks) + 1):
                marks.append(resident_mib())
                tell(f"{done:,} samples: {marks[-1]:,.0f} MiB resident")
    seconds = time.perf_counter() - began
    return {
        "samples": samples, "batch_size": batch_size, "image_size": image_size, "workers": workers,
        "seek_s": seek_s, "before_mib": before_mib, "resident_mib": marks,
        "most_mib": max(marks), "grown_mib": marks[-1] - marks[len(marks) // 10],
        "samples_per_s": done / seconds,
    }  # fmt: skip


def _loader(
    source: StubbedImages, settings: DataSettings, batch_size: int, first_step: int
) -> TrainBatches:
    plan = BatchPlan(len(source), 1, batch_size, batch_size, 1)
    return create_train_loader(
        source, plan, settings, seed=0, rank=0, first_step=first_step, device=torch.device("cpu")
    )


def resident_mib() -> float:
    """Of this process, now; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
