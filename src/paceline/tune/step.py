"""Runs and times a training step on synthetic images."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.data import BatchPlan
from paceline.models.registry import create_model
from paceline.train.step import TrainStep
from paceline.train.step_parts import create_parts, create_step
from paceline.train.step_time import SyntheticBatches
from paceline.train.stop_signals import StopSignals
from paceline.tune.timing import Times, steady_times

_DEFAULTS: dict[str, Any] = {
    "optim.name": "lars",
    "optim.lr": 0.5,
    "optim.weight_decay": 5e-5,
    "run.smoothing": 0.1,
}


@dataclass(frozen=True)
class StepRow:
    """Describes a training step to measure.

    Attributes:
        name: The name of the measurement in a table of results.
        kind: `ours` for Paceline's step, `plain` for a step in plain PyTorch.
        model: The name of the model.
        batch_size: Number of images in the batch of one rank.
        image_size: Side of an image in pixels.
        classes: Number of classes.
        device: The device that computes the step, such as `cuda`.
        steps: Number of measured steps.
        warm_up: Number of steps before the measured ones.
        switches: Settings that differ from the defaults. For `ours`: settings by `section.key`. For
            `plain`: `dtype` (fp32, tf32, bf16, fp16), `compile` (off, default, reduce-overhead,
            max-autotune) and `channels_last`.
        group: True to create a process group of one rank, so that collectives are really called.
    """

    name: str
    kind: str
    model: str
    batch_size: int
    image_size: int
    classes: int
    device: str
    steps: int
    warm_up: int
    switches: dict[str, Any]
    group: bool = False


def build_step(row: StepRow, group: Group) -> tuple[TrainStep, str]:
    """Builds the step that training would run, and returns it with a description of its parts."""
    config = RunConfig().with_values(
        {**_DEFAULTS, "model.name": row.model, "data.image_size": row.image_size,
         "data.eval_resize": 0, **row.switches}
    )  # fmt: skip
    torch.manual_seed(0)
    model = create_model(
        config.model, num_classes=row.classes, image_size=row.image_size,
        in_channels=config.data.channels,
    )  # fmt: skip
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parts = create_parts(
        config, model.to(group.device), group, rate=0.1, micro_batch=row.batch_size,
        accumulate=False,
    )  # fmt: skip
    steps = row.steps + 2 * row.warm_up + 8
    batch = row.batch_size * group.world_size
    plan = BatchPlan(batch, steps, batch, row.batch_size, group.world_size)
    loader = SyntheticBatches(
        row.batch_size, row.image_size, row.classes, group.device, config.data.channels
    )
    step = create_step(config, parts, loader, plan, group, StopSignals())
    return step, "; ".join(filter(None, parts.describe().values()))


def measure_ours(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    """Measures the complete step of a training, a `TrainStep`, on synthetic images.

    The times include loss scaling, the check for finite gradients, gradient buckets, the update of
    fp32 master weights, and reading the outcome.

    Args:
        row: The step to measure.
        ready: Called during the warm-up; see `steady_times`.

    Returns:
        The time of each measured step, and a description of the step.
    """
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with Group(_topology(row), RunConfig().comm, device) as group:
        step, words = build_step(row, group)
        skipped = 0

        def collect() -> None:
            nonlocal skipped
            outcome = step.collect()
            skipped += outcome.skipped
            if not math.isfinite(outcome.loss):
                raise RunError(f"the loss is {outcome.loss} at step {outcome.number}")

        times = steady_times(
            lambda number: step.launch(number, 0.1), collect,
            lag=step.lag, repeats=row.steps, warm_up=row.warm_up, ready=ready,
        )  # fmt: skip
    return times, f"{words}, backend {group.backend}, {skipped} steps skipped"


def _topology(row: StepRow) -> Topology:
    """Returns the topology of a single process.

    With `row.group`, the process has a process group of one rank, so that collectives are really
    called.
    """
    if not row.group:
        return Topology()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return Topology.from_env(os.environ)
