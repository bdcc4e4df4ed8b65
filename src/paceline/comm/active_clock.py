"""`ActiveClock`: time that does not pass while the process is stopped.

In: calls of `now_s` at short intervals. Out: seconds in which this process could run. A job that a
scheduler or a user suspends as a whole (SIGSTOP, then SIGCONT) must not find on waking that all its
time-outs are over: between two calls the clock advances by `longest_s` at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class ActiveClock:
    """Starts at 0. Somebody must ask more often than every `longest_s` seconds."""

    def __init__(self, longest_s: float = 2.0) -> None:
        self._longest_s = longest_s
        self._passed_s = 0.0
        self._before = time.monotonic()
        self._lock = threading.Lock()

    def now_s(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._passed_s += min(now - self._before, self._longest_s)
            self._before = now
            return self._passed_s

    @contextmanager
    def ticking(self) -> Iterator[Self]:
        """A thread asks for as long as this lasts: for callers whose own calls may block for longer."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(self._longest_s / 4):
                self.now_s()

        threading.Thread(target=tick, name="paceline-clock", daemon=True).start()
        try:
            yield self
        finally:
            ended.set()
