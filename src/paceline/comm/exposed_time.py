"""`ExposedTime`: how long a step waits for its exchange once its own backward pass is over.

In: the moment when backward is over and the one when all sums are there. Out: the seconds between: of
the host's clock on a CPU, of the device's on a GPU, where they are read later, because asking would wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Reading = Callable[[], float]


class ExposedTime:
    """One measurement a step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began = 0.0
        self._began_event: torch.cuda.Event | None = None
        # The latest that is known, and how to read the latest that was measured.
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
            """Only once the device has passed `ended`."""
            self.last_s = began.elapsed_time(ended) / 1e3
            return self.last_s

        self.reading = read


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
