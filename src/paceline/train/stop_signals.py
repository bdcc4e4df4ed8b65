"""Signals that ask a run to stop.

In: SIGINT (Ctrl-C) and SIGTERM (scheduler, torchrun). Out: a flag that the step reads and shares with
the other ranks. Handlers only take note: the save that follows is never broken, not by a second
signal either.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.core.signal_context import SignalContext

HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals(SignalContext):
    """A context in which the two signals are noted instead of obeyed at once."""

    def __init__(self) -> None:
        super().__init__(HANDLED, self._note)
        self.received: signal.Signals | None = None

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
