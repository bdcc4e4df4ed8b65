"""Measures what takes time in a step: a `Timeline`, clock offsets of ranks, and exposed waits.

An exposed wait is the time that a step waits for its gradients after the backward pass. On a GPU, CUDA
events record times. The events are read after the traced steps, so that recording does not make the
host wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paceline.comm.group import Group
from paceline.comm.progress import ExchangeObserver

COMPUTE, EXCHANGE, HOST = "compute", "exchange", "host"
_CLOCK_ROUNDS = 20
Reading = Callable[[], float]


class TimelineSpan(NamedTuple):
    """One bar of a timeline, from `start_s` to `stop_s` on this rank's clock.

    `bucket` is the index of the bucket whose all-reduce the span shows, or -1 for other spans.
    """

    name: str
    track: str
    start_s: float
    stop_s: float
    step: int
    bucket: int = -1


class _Mark(NamedTuple):
    host_s: float
    event: torch.cuda.Event | None


class _Stretch(NamedTuple):
    name: str
    track: str
    start: _Mark
    stop: _Mark
    step: int
    bucket: int


class Timeline(ExchangeObserver):
    """Records what a rank does when in the steps `first` to `last`, and nothing in other steps.

    Args:
        first: The number of the first recorded step, counted from 1.
        last: The number of the last recorded step; 0 records nothing.
        device: The device of the training.
        device_exchanges: True if the all-reduces run on the device (NCCL), so that CUDA events record
            them.
    """

    def __init__(
        self, first: int, last: int, device: torch.device, *, device_exchanges: bool = False
    ) -> None:
        self._first, self.last = first, last
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._device_exchanges = device_exchanges
        self._step = 0
        self._stretches: list[_Stretch] = []
        self._sent: dict[int, _Mark] = {}
        self._begun: dict[int, _Mark] = {}

    @property
    def _records(self) -> bool:
        return self._first <= self._step <= self.last

    @contextmanager
    def span(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Records the start and the end of this block in the track of the training thread.

        Args:
            name: The name of the block in the timeline.
            host: True if the block does not use the device. On a GPU, the host's clock is then used.
        """
        if not self._records:
            yield
            return
        start = self._mark(self._on_gpu and not host)
        yield
        stop = self._mark(self._on_gpu and not host)
        self._stretches.append(_Stretch(name, COMPUTE, start, stop, self._step, -1))

    def step_begun(self, step: int) -> None:
        self._step = step + 1
        self._sent.clear()
        self._begun.clear()

    def sent(self, bucket: int) -> None:
        if self._records:
            self._sent[bucket] = self._mark(self._device_exchanges)

    def begun(self, bucket: int) -> None:
        if self._records:
            self._begun[bucket] = self._mark(self._device_exchanges)

    def ended(self, bucket: int) -> None:
        start = self._begun.pop(bucket, None)
        if start is None:
            return
        stop = self._mark(self._device_exchanges)
        self._stretches.append(_Stretch("bucket", EXCHANGE, start, stop, self._step, bucket))
        sent = self._sent.pop(bucket, start)
        self._stretches.append(_Stretch("sent", COMPUTE, sent, sent, self._step, bucket))

    def spans(self) -> list[TimelineSpan]:
        """Waits for the device, and returns all recorded bars of the timeline that have ended."""
        now: _Mark | None = None
        if self._on_gpu and self._stretches:
            now = self._mark(True)
            assert now.event is not None
            now.event.synchronize()
            now = now._replace(host_s=time.perf_counter())
        timeline = []
        for stretch in self._stretches:
            name, track, start, stop, step, bucket = stretch
            if now is None or start.event is None or stop.event is None:
                track = HOST if self._on_gpu and track == COMPUTE else track
                timeline.append(TimelineSpan(name, track, start.host_s, stop.host_s, step, bucket))
                continue
            start_s, stop_s = _device_s(start.event, now), _device_s(stop.event, now)
            timeline.append(TimelineSpan(name, track, start_s, stop_s, step, bucket))
            if track == COMPUTE and bucket < 0:
                timeline.append(TimelineSpan(name, HOST, start.host_s, stop.host_s, step, bucket))
        return timeline

    def _mark(self, device: bool) -> _Mark:
        event = None
        # During a capture, the event would become part of the CUDA graph and could not be read.
        if device and self._on_gpu and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return _Mark(time.perf_counter(), event)


def _device_s(event: Any, now: _Mark) -> float:
    """Returns the time on the host's clock at which the device passed `event`.

    `now` is a point in time with both a host time and a recorded event.
    """
    return float(now.host_s - event.elapsed_time(now.event) / 1e3)


class ClockOffset(NamedTuple):
    """The offset of a rank's clock from rank 0's clock, with an error of at most `residual_s`.

    A time of the rank minus `offset_s` is a time of rank 0's clock.
    """

    offset_s: float
    residual_s: float


def measure_offsets(group: Group) -> list[ClockOffset] | None:
    """Measures the clock offset of each rank. All ranks call this.

    Returns:
        The offsets in order of rank on rank 0; None on other ranks.
    """
    tick, times = torch.zeros(1, device=group.device), []
    for _ in range(_CLOCK_ROUNDS):
        times.append(time.perf_counter())
        group.all_reduce_sum(tick)
        float(tick)  # waits for the GPU; so far the all-reduce has only been queued there
        times.append(time.perf_counter())
    rows = group.gather(torch.tensor(times, dtype=torch.float64, device=group.device))
    return None if rows is None else clock_offsets(rows.tolist())


def clock_offsets(rows: Sequence[Sequence[float]]) -> list[ClockOffset]:
    """Estimates clock offsets from the times at which ranks enter and leave a few tiny all-reduces.

    No rank leaves an all-reduce before all ranks have entered the all-reduce. So the offset o of rank
    r's clock obeys enter_r − leave_0 ≤ o ≤ leave_r − enter_0. Each all-reduce gives such bounds. The
    estimate is the middle between the largest lower bound and the smallest upper bound.

    Args:
        rows: For each rank, the times on its own clock: enter, leave, enter, leave, …

    Returns:
        The offset of each rank.
    """
    enters, leaves = [row[0::2] for row in rows], [row[1::2] for row in rows]
    estimates = []
    for enter, leave in zip(enters, leaves, strict=True):
        low = max(mine - first for mine, first in zip(enter, leaves[0], strict=True))
        high = min(mine - first for mine, first in zip(leave, enters[0], strict=True))
        # If a clock was set during the measurement, `low` can be above `high`.
        estimates.append(ClockOffset((low + high) / 2, abs(high - low) / 2))
    return [ClockOffset(0.0, 0.0), *estimates[1:]]


class ExposedTime:
    """Measures how long a step waits for its all-reduces after its backward pass.

    On a CPU, times are read from the host's clock. On a GPU, CUDA events record them, and are read
    later, because reading an event waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began = 0.0
        self._began_event: torch.cuda.Event | None = None
        # The latest time that has been read, and a function that reads the latest measurement.
        self.last_s = 0.0
        self.reading: Reading = lambda: self.last_s

    def begin(self) -> None:
        self._began = time.perf_counter()
        if self._on_gpu:
            self._began_event = _event()

    def end(self) -> None:
        if self._began_event is None:
            self.last_s = seconds = time.perf_counter() - self._began
            self.reading = lambda: seconds
            return
        began, ended = self._began_event, _event()

        def read() -> float:
            """Returns the seconds of waiting, once the device has passed the event `ended`."""
            self.last_s = began.elapsed_time(ended) / 1e3
            return self.last_s

        self.reading = read


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
