"""Records completed steps, and ends a run that keeps skipping steps.

In jobs of up to eight ranks, every rank writes its events to a file. In larger jobs, only rank 0
writes all events. Whenever such a run pauses (for an evaluation, a checkpoint or the end), rank 0
gathers the step times of all ranks and records a `RanksEvent` for each step (`RankTimes`).
`check_divergence` ends a diverged run with the same error on all ranks. The error names step and
layer, and the last good checkpoint is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

import torch

from paceline.comm.group import Group
from paceline.config import RunSettings
from paceline.core.errors import DivergedError
from paceline.core.events import (
    CorruptEvent,
    Event,
    MetricEvent,
    NoteEvent,
    RanksEvent,
    StepEvent,
)
from paceline.core.host import HostLoad, describe_overload
from paceline.core.units import format_bytes, format_duration
from paceline.plan.noise import NoiseEstimate, NoiseScale
from paceline.train.machine import peak_memory_bytes
from paceline.train.step import StepOutcome
from paceline.train.strategy import strategy_fields
from paceline.train.training import Training

# The expected time is displayed after this number of steps, unless less than this time is left.
OUTLOOK_STEPS, LEAST_OUTLOOK_S = 10, 20.0


class StepRecords:
    """Updates the progress and emits a `StepEvent` for each completed step."""

    def __init__(self, training: Training) -> None:
        self._t = training
        group, settings = training.group, training.config.run
        self._rank_times: RankTimes | None = None
        if group.world_size > 1 and not each_rank_writes(settings, group.world_size):
            self._rank_times = RankTimes(group, training.emit)
        # If not every rank writes a file, only the first rank of each host reports an overloaded host.
        notes = self._rank_times is None or group.topology.local_rank == 0
        self._load, self._overload_noted = HostLoad(), not notes
        self._noise = NoiseScale(*training.progress.noise)
        self._first_steps_s: list[float] = []

    def add(self, outcome: StepOutcome, train_s: float) -> None:
        """Records a completed step.

        Args:
            outcome: The outcome of the step.
            train_s: Training time in seconds since the start of the run.
        """
        strategy = self._t.step.strategy
        t, progress, number = self._t, self._t.progress, outcome.number
        first, last = t.plan.step_range(number)
        progress.step = number + 1
        progress.images += last - first
        progress.step_s += outcome.step_s
        progress.train_s = train_s
        progress.skipped_steps += outcome.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        progress.loss_finite = math.isfinite(outcome.loss)
        t.finish_save(wait=False)
        self._note_fallback()
        estimate = self._noise_estimate(outcome, last - first)
        event = StepEvent(
            step=progress.step,
            epoch=t.plan.epoch_at(progress.step),
            loss=outcome.loss,
            lr=outcome.rate,
            images_per_s=(last - first) / outcome.step_s,
            step_s=outcome.step_s,
            data_s=outcome.data_s,
            skipped=outcome.skipped,
            loss_scale=outcome.loss_scale,
            exposed_comm_s=outcome.exposed_comm_s,
            input_stall_s=sum(outcome.stall.values()),
            input_stall_causes=outcome.stall,
            core_wait_share=self._core_wait_share(),
            grad_norm=outcome.grad_norm if t.config.optim.clip_norm else None,
            grad_signal=None if estimate is None else estimate.signal,
            grad_variance=None if estimate is None else estimate.variance,
            noise_scale=None if estimate is None else self._noise.value,
            batch_size=last - first if t.plan.growth else None,
            momentum=t.schedule.others(number).get("momentum"),
            fields=strategy_fields(strategy, "record", strategy.record(outcome), StepEvent.names()),
        )
        t.emit(event)
        self._note_outlook(outcome.step_s)
        if self._rank_times is not None:
            self._rank_times.note(event)

    def gather_times(self) -> None:
        """Gathers the step times of all ranks. Called in a pause, because a collective delays steps."""
        if self._rank_times is not None:
            self._rank_times.gather()

    def forget_times(self) -> None:
        """Drops step times that were not gathered from all ranks."""
        if self._rank_times is not None:
            self._rank_times.forget()

    def _noise_estimate(self, outcome: StepOutcome, samples: int) -> NoiseEstimate | None:
        """Estimates the gradient noise scale of a step, and adds the estimate to the running averages.

        Returns None if the step was skipped or nothing was measured.
        """
        if not self._t.config.run.noise_scale or outcome.skipped:
            return None
        micro_batches = -(-samples // self._t.plan.micro_batch)
        estimate = NoiseEstimate.of(
            outcome.whole_squared, outcome.parts_squared, samples, micro_batches
        )
        if estimate is not None:
            self._noise.add(estimate)
            self._t.progress.noise = [
                self._noise.signal, self._noise.variance, self._noise.weight,
            ]  # fmt: skip
        return estimate

    def _note_outlook(self, step_s: float) -> None:
        """Emits a note with the expected time and the memory, once, unless the run ends soon."""
        t, first_s = self._t, self._first_steps_s
        if len(first_s) == OUTLOOK_STEPS or not t.is_main:
            return
        first_s.append(step_s)
        left = t.plan.total_samples - t.progress.images
        left_s = median(first_s[-OUTLOOK_STEPS // 2 :]) * left / t.plan.global_batch
        if len(first_s) == OUTLOOK_STEPS and left_s >= LEAST_OUTLOOK_S:
            memory = format_bytes(peak_memory_bytes(t.group.device))
            text = f"{format_duration(left_s)} of training left, without evaluations"
            t.emit(NoteEvent(f"expected: {text}; memory {memory} per rank"))

    def _note_fallback(self) -> None:
        """Emits a note, once, if CUDA graphs are not used although the settings ask for them."""
        reason, chosen = self._t.step.micro.uncaptured, self._t.chosen
        if reason and "not captured" not in chosen["speed"]:
            chosen["speed"] += f"; not captured: {reason}"
            self._t.emit(NoteEvent(f"steps are not captured from here on: {reason}"))

    def _core_wait_share(self) -> float | None:
        """Returns the latest share of time spent waiting for a core; notes the first overload."""
        if (share := self._load.read()) is not None:
            text = describe_overload(share)
            if text and not self._overload_noted:
                self._overload_noted = True
                self._t.emit(NoteEvent(text))
        return self._load.latest


# Number of skipped steps in a row that ends the run if the loss is not finite: no loss scale helps.
_BAD_LOSSES = 10
# Number of skipped steps in a row that ends the run for any reason.
_SKIPPED_STEPS = 50


def check_divergence(training: Training, outcome: StepOutcome) -> None:
    """Ends the run if too many steps were skipped.

    The decision uses only values that are equal on all ranks.

    Args:
        training: The run.
        outcome: The outcome of the latest step, which was skipped.

    Raises:
        DivergedError: If the run has diverged.
    """
    row = training.progress.skipped_in_a_row
    scale = training.step.scale
    bad_loss = not math.isfinite(outcome.loss)
    if bad_loss and row >= min(_BAD_LOSSES, _SKIPPED_STEPS):
        cause = f"the loss was not finite in {row} steps in a row"
    elif scale.dynamic and outcome.loss_scale <= scale.floor:
        cause = f"gradients overflow even at the lowest loss scale, {scale.floor:g}"
    elif row >= _SKIPPED_STEPS:
        cause = f"gradients were not finite in {row} steps in a row"
    else:
        return
    # The first step of the skipped steps in a row, counted from 1 as in the display.
    began = outcome.number + 1 - row + 1
    place = ""
    names = training.step.exchange.names  # in the order of the backward pass
    if outcome.bad:
        first = next(name for name in names if name in outcome.bad)
        place = f"first in the gradient of {first} ({len(outcome.bad)} of {len(names)} tensors)"
    kept = "; the last good checkpoint is kept" if training.saved_step >= 0 else ""
    raise DivergedError(
        f"diverged at step {began}: {cause}{place and '; '}{place}",
        f"lower --lr (now {training.schedule.peak:g} at its peak) or lengthen --warmup-epochs{kept}",
    )


# Largest number of ranks (those of one typical node) at which each rank writes a file.
_EACH_WRITES = 8
# Largest number of steps whose times are gathered at once; of more steps, only the latest are kept.
_GATHERED_STEPS = 256


# Kinds of events that no other rank records.
RARE_EVENTS: tuple[type[Event], ...] = (CorruptEvent, NoteEvent, MetricEvent)


def each_rank_writes(settings: RunSettings, world_size: int) -> bool:
    """Returns True if every rank writes all its events to a file."""
    return world_size <= _EACH_WRITES or bool(settings.traced_steps)


class RankTimes:
    """Collects the step times of this rank and gathers those of all ranks on rank 0."""

    def __init__(self, group: Group, emit: Callable[[Event], None]) -> None:
        self._group, self._emit = group, emit
        # Pairs of a step and the four times that `note` takes from its event.
        self._rows: deque[tuple[int, list[float]]] = deque(maxlen=_GATHERED_STEPS)

    def note(self, event: StepEvent) -> None:
        """Adds the times of one step on this rank."""
        waited = math.nan if event.core_wait_share is None else event.core_wait_share
        times = [event.step_s, event.exposed_comm_s, event.input_stall_s, waited]
        self._rows.append((event.step, times))

    def forget(self) -> None:
        """Drops the recorded step times."""
        self._rows.clear()

    def gather(self) -> None:
        """Emits a `RanksEvent` for each recorded step on rank 0. All ranks call this together."""
        if not self._rows:
            return
        steps, rows_here = zip(*self._rows, strict=True)
        self._rows.clear()
        rows = torch.tensor(rows_here, dtype=torch.float64, device=self._group.device)
        of_all = self._group.gather(rows)
        if of_all is None:
            return
        for number, step in enumerate(steps):
            step_s, exposed_s, stall_s, waited = (
                of_all[:, number, column].tolist() for column in range(4)
            )
            self._emit(
                RanksEvent(
                    step=step,
                    ranks=len(step_s),
                    step_s=_spread(step_s),
                    exposed_comm_s=_exposed(exposed_s),
                    input_stall_s=_spread(stall_s),
                    core_wait_share=_spread([w for w in waited if not math.isnan(w)]),
                )
            )


def _spread(values: list[float]) -> dict[str, float]:
    """Returns minimum, median and maximum of a time of all ranks, and the `rank` with the maximum."""
    if not values:
        return {}
    largest = max(values)
    return {
        "min": min(values), "median": median(values), "max": largest, "rank": values.index(largest),
    }  # fmt: skip


def _exposed(waits: list[float]) -> dict[str, float]:
    """Returns the spread of the times that ranks waited for their all-reduces.

    `rank` is the rank that waited least, because it arrived last. `others` is the median wait of all
    other ranks.
    """
    least = min(waits)
    last = waits.index(least)
    others = [wait for rank, wait in enumerate(waits) if rank != last]
    return {**_spread(waits), "rank": last, "others": median(others or waits)}
