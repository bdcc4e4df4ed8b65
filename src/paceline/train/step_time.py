"""Measures a few training steps of one rank on synthetic images, before a run starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.comm.tracing import COMPUTE, Timeline
from paceline.config import RunConfig
from paceline.data import Batch, BatchPlan, CorruptSample
from paceline.data.prefetch import Closing
from paceline.train.resolve import without_exchange
from paceline.train.step_parts import create_parts, create_step
from paceline.train.stop_signals import StopSignals

_BATCHES = 4
_WARM_UP, _STEPS = 2, 5
# On a CPU the time of a few images is enough, and a batch that does not fit does no harm.
_CPU_IMAGES = 8


@dataclass(frozen=True)
class StepTime:
    """How long a step takes on one rank, without the all-reduce of gradients.

    Attributes:
        images: Number of images in the measured step.
        images_s: Seconds for forward and backward of these images.
        update_s: Seconds for the update.
        choices: Descriptions of the automatic choices (format, kernels and so on) by name.
    """

    images: int
    images_s: float
    update_s: float
    choices: dict[str, str]


class SyntheticBatches(Closing):
    """An endless loader that repeats a few batches of random images, which stay on the device."""

    corrupt: tuple[CorruptSample, ...] = ()

    def __init__(
        self, samples: int, image_size: int, classes: int, device: torch.device, channels: int = 3
    ) -> None:
        torch.manual_seed(0)
        shape = (samples, image_size, image_size, channels)
        self._batches = [
            Batch(
                torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
                torch.randint(0, classes, (samples,), device=device),
            )
            for _ in range(_BATCHES)
        ]
        self._next = 0

    def describe(self) -> str:
        return "synthetic, on the device"

    def note(self) -> str:
        return ""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._next += 1
        return self._batches[self._next % _BATCHES]

    def close(self) -> None:
        """Does nothing, because this loader has no resources to release."""


def measure_step(
    config: RunConfig, model: nn.Module, group: Group, *, micro_batch: int, classes: int,
    ranks: int = 1, steps_per_epoch: float = 1.0, limit_s: float = 20.0, steps: int = _STEPS,
    cpu_images: int = _CPU_IMAGES,
) -> StepTime:  # fmt: skip
    """Measures how long training steps take on one rank.

    Args:
        config: The settings of the run.
        model: The model, which is trained.
        group: This process alone.
        micro_batch: Number of images in a micro-batch.
        classes: Number of classes.
        ranks: Number of ranks of the run.
        steps_per_epoch: Number of steps of an epoch.
        limit_s: Seconds after which no further step begins.
        steps: Number of steps after the warm-up.
        cpu_images: On a CPU, at most this many images are measured.
    """
    device, data = group.device, config.data
    config = without_exchange(config, ranks)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = model.to(device)
    micro = micro_batch if device.type == "cuda" else min(micro_batch, cpu_images)
    parts = create_parts(
        config, model, group, rate=1e-6, micro_batch=micro, accumulate=False, classes=classes,
        steps_per_epoch=steps_per_epoch,
    )  # fmt: skip
    plan = BatchPlan(micro, _WARM_UP + steps, micro, micro, 1)
    loader = SyntheticBatches(micro, data.image_size, classes, device, data.channels)
    step = create_step(config, parts, loader, plan, group, StopSignals())
    step.spans = timeline = Timeline(1, _WARM_UP + steps, device)
    times: list[float] = []
    started = time.perf_counter()
    for number in range(_WARM_UP + steps):
        before = time.perf_counter()
        timeline.step_begun(number)
        step.run(number, 1e-6)
        times.append(time.perf_counter() - before)
        if time.perf_counter() - started > limit_s:
            break
    updates = [
        span.stop_s - span.start_s
        for span in timeline.spans()
        if span.name == "update" and span.track == COMPUTE
    ]
    step.release()
    parts.exchange.close()
    return StepTime(micro, *step_seconds(times, updates, 1), parts.describe())


def step_seconds(
    steps_s: Sequence[float], updates_s: Sequence[float], parts: float
) -> tuple[float, float]:
    """Returns the seconds for forward and backward of a step, and the seconds for the update.

    Args:
        steps_s: The seconds of measured steps, each of which has only a part of the images of a real
            step. The first steps warm up and are ignored if there are later steps.
        updates_s: The seconds of the updates in these steps.
        parts: The number of such parts in a real step.
    """
    pairs = list(zip(steps_s, updates_s, strict=True))
    pairs = pairs[_WARM_UP:] or pairs
    images_s = statistics.median(step - update for step, update in pairs)
    return parts * images_s, statistics.median(update for _, update in pairs)
