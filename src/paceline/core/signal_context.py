"""`SignalContext`: signals heard by a handler of ours for as long as a context lasts.

In: signals and a handler. Out: nothing; on leaving, whoever heard them before hears them again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self


class SignalContext:
    """To be entered in the main thread, as Python asks of whoever sets handlers."""

    def __init__(
        self,
        numbers: Iterable[signal.Signals],
        handler: Callable[[int, FrameType | None], None],
    ) -> None:
        self._numbers = tuple(numbers)
        self._handler = handler
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._before[number] = signal.signal(number, self._handler)
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class SignalWakeup:
    """Tells other threads which signals have reached the process, also while the main thread is inside a
    wait in C and its Python handlers cannot run (`signal.set_wakeup_fd`)."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = frozenset(int(number) for number in numbers)
        self._read, self._write, self._before = -1, -1, -1
        self._arrived = False

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *details: object) -> None:
        signal.set_wakeup_fd(self._before)
        read, self._read = self._read, -1
        os.close(read)
        os.close(self._write)

    def arrived(self) -> bool:
        """Whether one of the signals has come."""
        try:
            while not self._arrived and self._read >= 0 and (data := os.read(self._read, 64)):
                if any(byte in self._numbers for byte in data):
                    self._arrived = True
        except OSError:
            pass  # nothing new, or closed meanwhile
        return self._arrived
