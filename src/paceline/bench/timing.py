"""Times of repeated work, after a warm-up: device time between CUDA events, or wall time."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Long enough for the host to queue a whole optimizer step before the GPU starts it.
_HEAD_START_CYCLES = 20_000_000


@dataclass(frozen=True)
class Times:
    """Seconds of each repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and 90th percentile."""
        ordered = sorted(self.seconds)
        last = len(ordered) - 1
        return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


def device_times(
    work: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int
) -> Times:
    """Time on the device alone: the host gets a head start, so that launch overhead does not count."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return _host_times(work, repeats)
    pairs = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize(device)
    return Times(tuple(start.elapsed_time(stop) / 1e3 for start, stop in pairs))


def _host_times(work: Callable[[], object], repeats: int) -> Times:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Times(tuple(seconds))


def steady_times(
    launch: Callable[[int], None],
    wait: Callable[[], object],
    *,
    lag: int,
    repeats: int,
    warm_up: int,
    ready: Callable[[], None] = lambda: None,
) -> Times:
    """Wall time between completed steps, with `lag` steps in flight.

    `ready` is called after a first part of the warm-up; it may block until the measurement may start.
    """
    first = max(warm_up // 2, 1)
    for number in range(first):
        launch(number)
        wait()
    ready()
    marks: list[float] = []
    for number in range(first, first + warm_up + repeats + lag + 1):
        launch(number)
        if number >= first + lag:
            wait()
            marks.append(time.perf_counter())
    for _ in range(lag):
        wait()
    return Times(tuple(b - a for a, b in itertools.pairwise(marks[-repeats - 1 :])))
