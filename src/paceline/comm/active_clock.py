"""`ActiveClock`: time that does not pass while the process is stopped.

In: calls of `now_s` at short intervals. Out: seconds in which this process could run. A job that a
scheduler or a user suspends as a whole (SIGSTOP, then SIGCONT) must not find on waking that all its
time-outs are over: between two calls the clock advances by `longest_s` at most.
"""

from __future__ import annotations

import time


class ActiveClock:
    """Starts at 0. For one thread, which asks more often than every `longest_s` seconds."""

    def __init__(self, longest_s: float = 2.0) -> None:
        self._longest_s = longest_s
        self._passed_s = 0.0
        self._before = time.monotonic()

    def now_s(self) -> float:
        now = time.monotonic()
        self._passed_s += min(now - self._before, self._longest_s)
        self._before = now
        return self._passed_s
