"""`InputWait`: how long a step stood still for want of its batches, and why.

In: the moments before and after each batch is handed over. Out: seconds by cause. On a GPU the host waits
for a batch while the device is still busy with the step before: only what the device itself stood
still counts, taken between events on its own clock: up to the batch, or to where the device's own work
on the batch begins. What it stood still longer than the host waited, it waited for the batch's copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from paceline.data.cause_clock import added, shared_out
from paceline.data.on_device.own_stream import marked


class InputWait:
    """One a step. A context manager around the wait for each batch; `stall` once the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Any = None
        self._started = 0.0
        self._host_s = 0.0
        self._waits: list[tuple[float, Mapping[str, float], Any, Any]] = []
        self._events: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        self._before = marked(self._device)
        self._started = time.perf_counter()

    def __exit__(self, *details: object) -> None:
        # Behind all that was queued so far, which may include the wait for a copy.
        self._host_s = time.perf_counter() - self._started
        self._events = (self._before, marked(self._device))

    def put_down_to(self, spent: Mapping[str, float], begun: Any = None) -> None:
        """What making the batch just waited for took, and its `begun`."""
        before, after = self._events
        self._waits.append((self._host_s, spent, before, after if begun is None else begun))

    def stall(self) -> dict[str, float]:
        """Seconds by cause. On a GPU the step's work must be done."""
        return added(*(_causes(*wait) for wait in self._waits))


def _causes(host_s: float, spent: Mapping[str, float], before: Any, after: Any) -> dict[str, float]:
    if before is None:
        return shared_out(host_s, spent)
    idle_s = before.elapsed_time(after) / 1e3
    stall = shared_out(min(idle_s, host_s), spent)
    return added(stall, {"copy": idle_s - host_s}) if idle_s > host_s else stall
