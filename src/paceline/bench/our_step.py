"""Our training step on synthetic images that lie on the device already.

In: a row with settings. Out: the time of the very `TrainStep` that training runs, with everything in it:
loss scaling, finite check, flat gradient buffers, LARS on masters, outcome read back.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.bench.step_row import StepRow
from paceline.bench.timing import Times, steady_times
from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.data.batch import Batch, CorruptSample
from paceline.data.batch_plan import BatchPlan
from paceline.data.normalize import Normalizer
from paceline.models.registry import create_model
from paceline.precision.loss_scale import LossScale
from paceline.precision.policy import allow_tf32, choose_policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.fast_path import choose_fast_path
from paceline.train.micro_step import MicroStep
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.training import create_master_optimizer
from paceline.train.update import Update

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
    policy = choose_policy(config.precision, group.device)
    allow_tf32(config.precision)
    torch.manual_seed(0)
    model = create_model(config.model, num_classes=row.classes, image_size=row.image_size)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = model.to(group.device)
    optimizer = create_master_optimizer(config.optim, model, policy, 0.1)
    steps = row.steps + 2 * row.warm_up + 8
    plan = BatchPlan(row.batch_size, steps, row.batch_size, row.batch_size, 1)
    exchange = GradientExchange(model.named_parameters(), group)
    norms, scale = BatchNormState(model), LossScale(policy, config.precision)
    fast = choose_fast_path(config.run, model, group.device)
    normalize = Normalizer(
        config.data.mean, config.data.std, 3, policy.dtype, channels_out=fast.image_channels
    )
    micro = MicroStep(
        fast.forward, policy, normalize, exchange, scale, config.run.smoothing, graphs=fast.graphs
    )
    step = TrainStep(
        model, micro, Update(model, optimizer, exchange, norms, scale, graphs=fast.graphs),
        exchange, norms, SyntheticBatches(row, group.device), normalize, policy, plan, group,
        StopSignals(), scale, 0,
    )  # fmt: skip
    words = f"{policy.name}, {config.optim.name} {optimizer.path}, {fast.describe()}"
    return step, words


def measure(row: StepRow, ready: Callable[[], None]) -> tuple[Times, str]:
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    with Group(_topology(row), RunConfig().comm, device) as group:
        step, words = build(row, group)
        times = steady_times(
            lambda number: step.launch(number, 0.1), step.collect,
            lag=step.lag, repeats=row.steps, warm_up=row.warm_up, ready=ready,
        )  # fmt: skip
    return times, f"{words}, backend {group.backend}"


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
