"""What ranks other than 0 record.

Where every rank has a file of its own, each of them writes to it in every step, often on one shared file
system. Of many ranks only rank 0 writes: it gathers the times of all of them whenever the run pauses
(an evaluation, a checkpoint, the end) and records how they spread, with the slowest rank, as a
`RanksEvent` for each step. The other ranks keep their latest events in memory (`RecentEvents`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from paceline.comm.group import Group
from paceline.config import RunSettings
from paceline.core.events import (
    CorruptEvent,
    Event,
    JsonlWriter,
    MetricEvent,
    NoteEvent,
    RanksEvent,
    StartEvent,
    StepEvent,
)

# `auto`: up to so many ranks, those of one node, each writes its own file.
_EACH_WRITES = 8
_KEPT_EVENTS = 1000
# Steps of one gathering; of a longer stretch, the latest.
_GATHERED_STEPS = 256


def each_rank_writes(settings: RunSettings, world_size: int) -> bool:
    """Whether every rank writes all its events to a file of its own."""
    if settings.rank_records == "auto":
        return world_size <= _EACH_WRITES or settings.trace
    return settings.rank_records == "on"


class RecentEvents:
    """An `Observer` that keeps the latest events in memory and writes them when asked to.

    Notes, corrupt samples and numbers of callbacks are of this rank alone, so they are written at once.
    """

    def __init__(self, path: Path, *, keeps: bool = True) -> None:
        self._path = path
        self._kept: deque[tuple[Event, float]] = deque(maxlen=_KEPT_EVENTS if keeps else 0)
        # Written first, however long ago it was.
        self._started: tuple[Event, float] | None = None
        self._writer: JsonlWriter | None = None

    def on_event(self, event: Event) -> None:
        if isinstance(event, CorruptEvent | NoteEvent | MetricEvent):
            self._open().on_event(event)
        elif isinstance(event, StartEvent):
            self._started = (event, time.time())
        else:
            self._kept.append((event, time.time()))

    def write(self) -> None:
        """Appends what is kept, and forgets it."""
        while self._kept:
            event, moment = self._kept.popleft()
            self._open().write(event, moment)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> JsonlWriter:
        if self._writer is None:
            self._writer = JsonlWriter(self._path)
            if self._started is not None:
                self._writer.write(*self._started)
        return self._writer


class RankTimes:
    """The times of all ranks, step by step, gathered on rank 0."""

    def __init__(self, group: Group, emit: Callable[[Event], None]) -> None:
        self._group, self._emit = group, emit
        self._steps: deque[int] = deque(maxlen=_GATHERED_STEPS)
        self._rows: deque[list[float]] = deque(maxlen=_GATHERED_STEPS)

    def note(self, event: StepEvent) -> None:
        waited = math.nan if event.core_wait_share is None else event.core_wait_share
        self._steps.append(event.step)
        self._rows.append([event.step_s, event.exposed_comm_s, event.input_stall_s, waited])

    def gather(self) -> None:
        """A collective: all ranks call it after the same step."""
        if not self._rows:
            return
        rows = torch.tensor(list(self._rows), dtype=torch.float64, device=self._group.device)
        steps = list(self._steps)
        self._rows.clear()
        self._steps.clear()
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
    """`rank` is that of the largest value."""
    if not values:
        return {}
    largest = max(values)
    return {
        "min": min(values), "median": median(values), "max": largest, "rank": values.index(largest),
    }  # fmt: skip


def _exposed(waits: list[float]) -> dict[str, float]:
    """`rank` waited least, so it was the last to arrive; `others`: the median of all but that one."""
    least = min(waits)
    last = waits.index(least)
    others = [wait for rank, wait in enumerate(waits) if rank != last]
    return {**_spread(waits), "rank": last, "others": median(others or waits)}
