"""What a run reports about its input: time without batches, corrupt samples, notes of the loaders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.comm.group import Group
from paceline.core.errors import RunError
from paceline.core.events import CorruptEvent, Event, NoteEvent
from paceline.data import CorruptSample, allowed_corrupt, divide_wait, mark_stream, sum_by_stage
from paceline.train.run_state import Progress


class InputWait:
    """Input stall of one step, by cause. A context manager around the wait for each batch.

    On a GPU the host waits for a batch while the device still computes the previous step, so only
    device idle time counts. It is measured with CUDA events up to the batch, or to where the device's
    own work on the batch begins. Idle time beyond the host's wait is attributed to the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Any = None
        self._started = 0.0
        self._host_s = 0.0
        self._waits: list[tuple[float, Mapping[str, float], Any, Any]] = []
        self._events: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        self._before = mark_stream(self._device)
        self._started = time.perf_counter()

    def __exit__(self, *details: object) -> None:
        self._host_s = time.perf_counter() - self._started
        # Recorded after all work queued so far, which may include the wait for a copy.
        self._events = (self._before, mark_stream(self._device))

    def attribute(self, spent: Mapping[str, float], begun: Any = None) -> None:
        """Attributes the last wait to the time `spent` on its batch by cause; `begun` is the
        batch's."""
        before, after = self._events
        self._waits.append((self._host_s, spent, before, after if begun is None else begun))

    def stall(self) -> dict[str, float]:
        """Seconds by cause. On a GPU the step must have completed."""
        return sum_by_stage(*(_causes(*wait) for wait in self._waits))


def _causes(host_s: float, spent: Mapping[str, float], before: Any, after: Any) -> dict[str, float]:
    if before is None:
        return divide_wait(host_s, spent)
    idle_s = before.elapsed_time(after) / 1e3
    stall = divide_wait(min(idle_s, host_s), spent)
    return sum_by_stage(stall, {"copy": idle_s - host_s}) if idle_s > host_s else stall


class InputReport:
    """Counts corrupt samples over all ranks and resumes, and emits each note and each sample once.

    Writes `progress.corrupt` (sorted indices of training samples) and `progress.corrupt_samples`, its
    length. A loader only knows what it met itself since its process started, and would count a sample
    again on every rank and after every resume.
    """

    def __init__(
        self,
        progress: Progress,
        samples: int,
        max_corrupt_share: float,
        group: Group,
        emit: Callable[[Event], None],
    ) -> None:
        """`samples` is the number of training samples."""
        self._progress = progress
        self._samples = samples
        self._share = max_corrupt_share
        self._group = group
        self._emit = emit
        self._emitted: set[str] = set()

    def training(self, here: Sequence[CorruptSample], count: int) -> None:
        """After a step in which all ranks together met `count` corrupt samples, this rank those in
        `here`. Raises RunError, on all ranks, once there are more than allowed."""
        if not count:
            return
        progress, known = self._progress, set(self._progress.corrupt)
        found = torch.zeros(self._samples, dtype=torch.int32, device=self._group.device)
        found[[sample.index for sample in here]] = 1
        self._group.all_reduce_sum(found)
        progress.corrupt = sorted(known | set(found.nonzero().flatten().tolist()))
        progress.corrupt_samples = len(progress.corrupt)
        new = [sample for sample in here if sample.index not in known]
        self._emit_samples(new, "train", elsewhere=count - len(here))
        limit = allowed_corrupt(self._share, self._samples)
        if progress.corrupt_samples > limit:
            raise RunError(
                f"{progress.corrupt_samples} corrupt of {self._samples} samples by step "
                f"{progress.step}, more than data.max_corrupt_share = {self._share:g} "
                f"allows ({limit})",
                "fix the data (metrics*.jsonl names the samples), or raise the share",
            )

    def evaluation(self, here: Sequence[CorruptSample], count: int) -> None:
        """After an evaluation, as for `training`; the limit is checked by `evaluate`."""
        self._progress.corrupt_val_samples = count
        self._emit_samples(here, "val", elsewhere=count - len(here))

    def note(self, text: str) -> None:
        """Emits a loader's note; every evaluation may repeat it."""
        if text and text not in self._emitted:
            self._emitted.add(text)
            self._emit(NoteEvent(text))

    def _emit_samples(
        self, samples: Iterable[CorruptSample], split: str, *, elsewhere: int
    ) -> None:
        """`elsewhere` samples were met by other ranks, whose own records name them."""
        for sample in samples:
            if f"{split} {sample.name}" not in self._emitted:
                self._emitted.add(f"{split} {sample.name}")
                event = CorruptEvent(self._progress.step, sample.name, sample.reason, split)
                self._emit(event)
        if elsewhere > 0 and self._group.rank == 0:
            self._emit(NoteEvent(f"{elsewhere} corrupt on other ranks; see metrics.rank*.jsonl"))
