"""Our training step on synthetic images that lie on the device already.

In: a row with settings. Out: the time of the very `TrainStep` that training runs, with everything in it:
loss scaling, finite check, flat gradient buffers, LARS on masters, outcome read back.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.bench.step_row import StepRow
from paceline.bench.timing import Times, steady_times
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.data.batch import Batch, CorruptSample
from paceline.data.batch_plan import BatchPlan
from paceline.models.registry import create_model
from paceline.train.step import TrainStep
from paceline.train.step_parts import create_parts, create_step
from paceline.train.stop_signals import StopSignals

_BATCHES = 4
_DEFAULTS: dict[str, Any] = {
    "optim.name": "lars",
    "optim.lr": 0.5,
    "optim.weight_decay": 5e-5,
    "run.smoothing": 0.1,
}


class SyntheticBatches:
    """A few batches of noise on the device, one after the other, for ever."""

    corrupt: tuple[CorruptSample, ...] = ()

    def __init__(self, row: StepRow, device: torch.device) -> None:
        torch.manual_seed(0)
        shape = (row.batch_size, row.image_size, row.image_size, 3)
        self._batches = [
            Batch(
                torch.randint(0, 256, shape, dtype=torch.uint8, device=device),
                torch.randint(0, row.classes, (row.batch_size,), device=device),
            )
            for _ in range(_BATCHES)
        ]
        self._next = 0

    def describe(self) -> str:
        return "synthetic, on the device"

    def remark(self) -> str:
        return ""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._next += 1
        return self._batches[self._next % _BATCHES]

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> SyntheticBatches:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def build(row: StepRow, group: Group) -> tuple[TrainStep, str]:
    """The step, and words for what was chosen."""
    config = RunConfig().with_values(
        {**_DEFAULTS, "model.name": row.model, "data.image_size": row.image_size,
         "data.eval_resize": 0, **row.switches}
    )  # fmt: skip
    torch.manual_seed(0)
    model = create_model(config.model, num_classes=row.classes, image_size=row.image_size)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parts = create_parts(
        config, model.to(group.device), group, rate=0.1, micro_batch=row.batch_size,
        accumulate=False,
    )  # fmt: skip
    steps = row.steps + 2 * row.warm_up + 8
    batch = row.batch_size * group.world_size
    plan = BatchPlan(batch, steps, batch, row.batch_size, group.world_size)
    loader = SyntheticBatches(row, group.device)
    step = create_step(config, parts, loader, plan, group, StopSignals())
    return step, "; ".join(parts.describe().values())


def measure(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with Group(_topology(row), RunConfig().comm, device) as group:
        step, words = build(row, group)
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
    """A lone process, or a launcher's group of one rank, whose collectives really are called."""
    if not row.group:
        return Topology()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(own, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return Topology.from_env(os.environ)
