"""`paceline bench input --train-step`: training from real compared with synthetic images."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from paceline.bench.input_rows import InputRow, OnProgress, create_train_loader_of, open_repeated
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import RunError
from paceline.core.topology import Topology
from paceline.data import sum_by_stage
from paceline.data.loaders.loader import PREFETCH_BATCHES
from paceline.models.settings import check_model_name
from paceline.train.step import TrainStep
from paceline.tune.step import StepRow, SyntheticBatches
from paceline.tune.step import build_step as build
from paceline.tune.timing import steady_times

# Warm-up steps of each turn, in addition to those with prefetched batches.
_SETTLE = 8


def measure_training(
    model: str, row: InputRow, switches: Mapping[str, Any], *, rounds: int, steps: int, warm_up: int,
    on_progress: OnProgress,
) -> dict[str, Any]:  # fmt: skip
    """Images/s of the training step with batches from the pipeline and with synthetic ones, in turns.
    `switches`: settings of the step.

    One step, captured and warmed up once, serves both. Each round times `steps` steps of each input;
    `warm_up` steps come before the first round. Rates come from sums, not medians, so that a stall
    counts in full.
    """
    settings = replace(row.settings, workers=row.workers)
    row = replace(row, settings=settings, split="train")
    stored = PREFETCH_BATCHES + _SETTLE
    total = warm_up + 2 * rounds * (steps + 2 * stored + 8)
    device = torch.device(row.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    check_model_name(model)
    source = open_repeated(settings, "train")
    step_row = StepRow(
        "training", "ours", model, row.batch_size, settings.image_size, len(source.classes),
        row.device, total, 1, dict(switches),
    )  # fmt: skip
    try:
        with (
            Group(Topology(), RunConfig().comm, device) as group,
            create_train_loader_of(row, source) as real,
        ):
            step, words = build(step_row, group)
            synthetic = SyntheticBatches(
                step_row.batch_size, step_row.image_size, step_row.classes, device
            )
            turns = _Turns(step, row.batch_size)
            step.loader = synthetic
            gc.collect()  # garbage of earlier rows must not be freed during a graph capture
            turns.measure(warm_up, 1)
            rates: dict[str, list[float]] = {"synthetic": [], "input": []}
            stalls: dict[str, list[dict[str, float]]] = {"synthetic": [], "input": []}
            for turn in range(rounds):
                for name in ("synthetic", "input") if turn % 2 else ("input", "synthetic"):
                    step.loader = synthetic if name == "synthetic" else real
                    rate, stall = turns.measure(steps, stored)
                    rates[name].append(rate)
                    stalls[name].append(stall)
                    on_progress(
                        f"round {turn + 1}: training, {name}: {rates[name][-1]:,.0f} images/s"
                    )
            described, remark = real.describe(), real.note()
    finally:
        source.close()
    return {
        "model": model, "batch_size": row.batch_size, "input": described, "remark": remark,
        "what": words,
        "synthetic_images_per_s": statistics.median(rates["synthetic"]),
        "input_images_per_s": statistics.median(rates["input"]),
        "share": statistics.median(
            a / b for a, b in zip(rates["input"], rates["synthetic"], strict=True)
        ),
        "input_stall_s_of_a_step": median_stall(stalls["input"]),
        "rounds": rates,
    }  # fmt: skip


def median_stall(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median over all rounds by cause; a missing cause counts as 0."""
    causes = dict.fromkeys(cause for stall in rounds for cause in stall)
    return {c: statistics.median(stall.get(c, 0.0) for stall in rounds) for c in causes}


class _Turns:
    """Runs a `TrainStep` with step numbers that increase from turn to turn."""

    def __init__(self, step: TrainStep, batch: int) -> None:
        self._step, self._batch = step, batch
        self._numbers = count()
        self._stalls: list[dict[str, float]] = []

    def measure(self, steps: int, warm_up: int) -> tuple[float, dict[str, float]]:
        """Images/s and the stall per step by cause, over `steps` steps after `warm_up` others."""
        self._stalls, lag = [], self._step.lag
        times = steady_times(self._launch, self._collect, lag=lag, repeats=steps, warm_up=warm_up)
        last = len(self._stalls) - lag  # later ones only drain the queue
        timed = self._stalls[last - steps : last]
        stall = {cause: seconds / len(timed) for cause, seconds in sum_by_stage(*timed).items()}
        return self._batch * len(times.seconds) / sum(times.seconds), stall

    def _launch(self, _: int) -> None:
        self._step.launch(next(self._numbers), 0.1)

    def _collect(self) -> None:
        outcome = self._step.collect()
        self._stalls.append(outcome.stall)
        if not math.isfinite(outcome.loss):
            raise RunError(f"the loss is {outcome.loss} at step {outcome.number}")
