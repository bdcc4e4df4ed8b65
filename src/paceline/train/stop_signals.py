"""Signals that ask a run to stop.

In: SIGINT (Ctrl-C) and SIGTERM (scheduler, torchrun). Out: a flag that the step reads and shares with
the other ranks. Handlers only take note: the save that follows is never broken, not by a second
signal either.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which the two signals are noted instead of obeyed at once."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in HANDLED:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Ctrl-C ends the process there and then, for as long as there is nothing to save.

    Python's own handler waits for the call in progress to return, and one that waits for other ranks
    may take minutes.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
