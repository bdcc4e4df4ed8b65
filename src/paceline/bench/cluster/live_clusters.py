"""The clusters of this process, and their end with it.

In: clusters as they open and close. Out: nothing; when the process exits or is asked to end (SIGTERM,
SIGINT, SIGHUP), all of them are torn down first. Then the signal goes on to whoever would have heard it
without us. A kill that cannot be heard leaves namespaces, which the next `sweep` finds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Protocol

from paceline.core.errors import LaunchError
from paceline.core.signal_context import SignalContext


class Closable(Protocol):
    def close(self) -> None: ...


# Handlers of somebody else's making know what they do, and a signal that is ignored shall be.
_REPLACED = (signal.SIG_DFL, signal.default_int_handler)
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LiveClusters:
    """One for the process; the first cluster that opens brings the handlers, the last takes them away."""

    def __init__(self) -> None:
        self._clusters: list[Closable] = []
        self._signals: SignalContext | None = None
        self._at_work = 0
        self._waiting: int | None = None

    def add(self, cluster: Closable) -> None:
        self._clusters.append(cluster)
        if self._signals is None and threading.current_thread() is threading.main_thread():
            numbers = [number for number in _NUMBERS if signal.getsignal(number) in _REPLACED]
            self._signals = SignalContext(numbers, self._hear)
            self._signals.__enter__()

    def discard(self, cluster: Closable) -> None:
        if cluster in self._clusters:
            self._clusters.remove(cluster)
        if not self._clusters:
            self._give_signals_back()

    def __enter__(self) -> None:
        """While namespaces are made or removed, a signal waits: half-done work cannot be undone."""
        self._at_work += 1

    def __exit__(self, *error: object) -> None:
        self._at_work -= 1
        if self._waiting is not None and self._at_work == 0:
            number, self._waiting = self._waiting, None
            self._hear(number, None)

    def close_all(self) -> None:
        for cluster in list(reversed(self._clusters)):
            with contextlib.suppress(LaunchError):
                cluster.close()

    def forget(self) -> None:
        """In a fork: the clusters are its parent's."""
        self._clusters.clear()
        self._give_signals_back()
        self._at_work, self._waiting = 0, None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._at_work:
            self._waiting = number
            return
        self.close_all()
        self._give_signals_back()
        os.kill(os.getpid(), number)

    def _give_signals_back(self) -> None:
        # Python gives handlers back in the main thread only, where they were set.
        if self._signals and threading.current_thread() is threading.main_thread():
            self._signals.__exit__(None, None, None)
            self._signals = None


live_clusters = LiveClusters()
atexit.register(live_clusters.close_all)
os.register_at_fork(after_in_child=live_clusters.forget)
