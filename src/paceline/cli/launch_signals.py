"""Signals to the launcher of `paceline train --nproc-per-node`.

In: SIGTERM, SIGINT and SIGHUP at the launcher. Out: one exception in the agent's loop, which hands the
ranks a SIGTERM and waits for them. What comes while they save changes nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from paceline.core.signal_context import SignalContext

# The agent gives ranks 30 s. Should it ever have lost the first signal, one after that counts again.
_DEAF_S = 35.0


class LaunchSignals(SignalContext):
    """A context in which the first signal raises `raised(text, signal)`, and the next ones nothing."""

    def __init__(self, raised: Callable[[str, signal.Signals], Exception]) -> None:
        numbers = [signal.SIGTERM, signal.SIGINT]
        # A hang-up that is ignored is nohup's will; the other two are always meant.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        super().__init__(numbers, self._hear)
        self.received: signal.Signals | None = None
        self._raised = raised
        self._heard_at = -_DEAF_S

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._heard_at < _DEAF_S:
            return
        self._heard_at = time.monotonic()
        self.received = signal.Signals(number)
        # Whatever it was, ranks get SIGTERM: it makes them save, also where a terminal was lost, and it
        # ends a Python that is still starting without the traceback that SIGINT leaves.
        raise self._raised(f"the launcher got {self.received.name}", signal.SIGTERM)
