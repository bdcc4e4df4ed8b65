"""Measures the training step of a model on this device, as a `Workload` for the planner.

The whole step is timed at each batch size, exactly as training runs it. Then steps are run without
CUDA graphs to measure the forward pass, backward pass and update separately, and when each gradient
is ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.comm.exchange import Signals
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.topology import Topology
from paceline.planner.workload import StepAnatomy, Workload, fit_workload
from paceline.train.batch_sizes import resolve_batch_sizes
from paceline.train.step import TrainStep
from paceline.tune.step import StepRow, build_step, measure_ours

_TAKEN_APART = 5
# The settings in `[run]` and `[data]` that affect the step (prefixes of their names).
_STEP = (
    "run.accel.", "run.cuda_graphs", "run.channels_last",
)  # fmt: skip
_IMAGES = (
    "data.channels", "data.mean", "data.std", "data.augment", "data.crop_padding", "data.crop_scale",
    "data.cutout",
)  # fmt: skip


def config_row(config: RunConfig, classes: int, ranks: int, device: str) -> StepRow:
    """Describes the step to measure: one micro-batch of one rank, with the settings of `config`.

    Args:
        config: The settings of the run.
        classes: The number of classes that the model distinguishes.
        ranks: The number of ranks among which the global batch is divided.
        device: The device on which the step is measured.
    """
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    sizes = resolve_batch_sizes(first, config.run.batch_size, ranks)
    usual = RunConfig().flat()
    switches = {
        name: value
        for name, value in config.flat().items()
        if value != usual.get(name) and name.startswith(("model.", "precision.", *_STEP, *_IMAGES))
    }
    return StepRow(
        "tune", "ours", config.model.name, sizes.micro_batch, config.data.image_size,
        classes, device, 10, 3,
        {**switches, "optim.name": config.optim.name},
    )  # fmt: skip


def profile_workload(row: StepRow, batches: Sequence[int]) -> Workload:
    """Measures the step of `row` at each batch size in `batches`; ignores `row.batch_size`."""
    steps = [
        (batch, measure_ours(replace(row, batch_size=batch), lambda: None)[0].median)
        for batch in sorted(set(batches))
    ]
    device = torch.device(row.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    anatomy = take_apart(replace(row, batch_size=max(batches)))
    words = f"profiled on {where}, batch {', '.join(str(batch) for batch, _ in steps)}"
    return fit_workload(row.model, steps, anatomy, words, row.image_size, device.type)


def take_apart(row: StepRow) -> StepAnatomy:
    """Runs a few steps, and returns the times in the step with the median forward + backward time."""
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    eager = replace(
        row, switches={**row.switches, "run.cuda_graphs": "off", "run.accel.compile": "off"}
    )
    with Group(Topology(), RunConfig().comm, device) as group:
        step, _ = build_step(eager, group)
        anatomies = [_one(step, device) for _ in range(_TAKEN_APART + 2)][2:]
    anatomies.sort(key=lambda anatomy: anatomy.forward_s + anatomy.backward_s)
    return anatomies[len(anatomies) // 2]


def _one(step: TrainStep, device: torch.device) -> StepAnatomy:
    batch = next(step.loader)
    clock = _Clock(device)
    order: list[tuple[str, int, bool, Callable[[], float]]] = []
    hooks = []
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad:
            half = parameter.dtype != torch.float32

            def ready(p: torch.Tensor, name: str = name, half: bool = half) -> None:
                order.append((name, p.numel(), half, clock.mark()))

            hooks.append(parameter.register_post_accumulate_grad_hook(ready))  # type: ignore[no-untyped-call]
    step.exchange.begin()
    step.scale.begin_step(len(batch.labels), len(batch.labels))
    begun = clock.mark()
    with step.policy.compute():
        outputs = step.micro.forward(step.normalize(batch.images, device))
    loss = F.cross_entropy(outputs.float(), batch.labels) * step.scale.step_value
    turned = clock.mark()
    loss.backward()  # type: ignore[no-untyped-call]
    over = clock.mark()
    step.exchange.gather()
    step.exchange.reduce(loss.detach(), Signals())
    step.strategy.finish(0.0, None)
    done = clock.mark()
    clock.synchronize()
    for hook in hooks:
        hook.remove()
    start = turned()
    return StepAnatomy(
        forward_s=start - begun(),
        backward_s=over() - start,
        update_s=done() - over(),
        gradients=tuple((name, size, half, at() - start) for name, size, half, at in order),
    )


class _Clock:
    """Records times during a step, with CUDA events on a GPU; they are read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: torch.cuda.Event | None = None

    def mark(self) -> Callable[[], float]:
        if self._device.type != "cuda":
            now = time.perf_counter()
            return lambda: now
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        first = self._first = self._first or event
        return lambda: float(first.elapsed_time(event)) / 1e3

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
