"""`Timeline`: what this rank did when, over a window of steps.

In: spans of the step (data, backward, …) and the calls of an exchange's observer. Out: `TimelineSpan`s in
seconds of this rank's clock. On a GPU the device's own times are taken by events, which are read once
the window is over, so that nothing waits while it is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

COMPUTE, EXCHANGE, HOST = "compute", "exchange", "host"


class TimelineSpan(NamedTuple):
    """`buffer` is an index into the plan's buffers; -1 where it is none."""

    name: str
    track: str
    start_s: float
    stop_s: float
    step: int
    buffer: int = -1


class _Mark(NamedTuple):
    host_s: float
    event: torch.cuda.Event | None


class _Stretch(NamedTuple):
    name: str
    track: str
    start: _Mark
    stop: _Mark
    step: int
    buffer: int


class Timeline:
    """An `ExchangeObserver`. Records steps `first` to `last`, counted from 1; else it costs nothing."""

    def __init__(
        self, first: int, last: int, device: torch.device, *, device_carries: bool = False
    ) -> None:
        """`device_carries`: the device exchanges by itself (NCCL), and its times count."""
        self._first, self.last = first, last
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._device_carries = device_carries
        self._step = 0
        self._stretches: list[_Stretch] = []
        self._sent: dict[int, _Mark] = {}
        self._begun: dict[int, _Mark] = {}

    @property
    def _records(self) -> bool:
        return self._first <= self._step <= self.last

    @contextmanager
    def span(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Of the thread that trains; `host`: nothing of it is the device's."""
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

    def sent(self, buffer: int) -> None:
        if self._records:
            self._sent[buffer] = self._mark(self._device_carries)

    def begun(self, buffer: int) -> None:
        if self._records:
            self._begun[buffer] = self._mark(self._device_carries)

    def ended(self, buffer: int) -> None:
        start = self._begun.pop(buffer, None)
        if start is None:
            return
        stop = self._mark(self._device_carries)
        self._stretches.append(_Stretch("buffer", EXCHANGE, start, stop, self._step, buffer))
        sent = self._sent.pop(buffer, start)
        self._stretches.append(_Stretch("sent", COMPUTE, sent, sent, self._step, buffer))

    def step_ended(self, exposed_s: float) -> None:
        """The wait is a span of the step's own."""

    def spans(self) -> list[TimelineSpan]:
        """All that was recorded; waits for the device. What was begun and never ended is left out."""
        now: _Mark | None = None
        if self._on_gpu and self._stretches:
            now = self._mark(True)
            assert now.event is not None
            now.event.synchronize()
            now = now._replace(host_s=time.perf_counter())
        found = []
        for stretch in self._stretches:
            name, track, start, stop, step, buffer = stretch
            if now is None or start.event is None or stop.event is None:
                track = HOST if self._on_gpu and track == COMPUTE else track
                found.append(TimelineSpan(name, track, start.host_s, stop.host_s, step, buffer))
                continue
            start_s, stop_s = _device_s(start.event, now), _device_s(stop.event, now)
            found.append(TimelineSpan(name, track, start_s, stop_s, step, buffer))
            if track == COMPUTE and buffer < 0:
                found.append(TimelineSpan(name, HOST, start.host_s, stop.host_s, step, buffer))
        return found

    def _mark(self, device: bool) -> _Mark:
        event = None
        # A recording would take the event in, and it would tell nothing.
        if device and self._on_gpu and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
        return _Mark(time.perf_counter(), event)


class NoTimeline:
    """Nothing is recorded."""

    @contextmanager
    def span(self, name: str, *, host: bool = False) -> Iterator[None]:
        yield


Spans = Timeline | NoTimeline


def _device_s(event: Any, now: _Mark) -> float:
    """When the device passed `event`, on the host's clock, which `now` ties to the device's."""
    return float(now.host_s - event.elapsed_time(now.event) / 1e3)
