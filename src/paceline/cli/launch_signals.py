"""Signals to the launcher of `paceline train --nproc-per-node`.

In: signals at the launcher. Out: for one that asks to stop (SIGTERM, SIGINT, SIGHUP, and SIGUSR1 or
SIGUSR2 where set so) one exception in the agent's loop, which hands the ranks a SIGTERM and waits for
them; what comes while they save changes nothing. A signal that asks for a save goes on to the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

from paceline.core.signal_context import SignalContext

# The agent gives ranks 30 s. Should it ever have lost the first signal, one after that counts again.
_DEAF_S = 35.0


class LaunchSignals(SignalContext):
    """A context in which the first signal raises `raised(text, signal)`, and the next ones nothing;
    those of `forwarded` go to the ranks."""

    def __init__(
        self,
        raised: Callable[[str, signal.Signals], Exception],
        *,
        stops: Collection[signal.Signals] = (),
        forwarded: Collection[signal.Signals] = (),
    ) -> None:
        """`stops`: besides SIGTERM, SIGINT and SIGHUP."""
        numbers = [signal.SIGTERM, signal.SIGINT, *stops, *forwarded]
        # A hang-up that is ignored is nohup's will; the other two are always meant.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        super().__init__(numbers, self._hear)
        self.received: signal.Signals | None = None
        self._raised = raised
        self._forwarded = frozenset(forwarded)
        self._heard_at = -_DEAF_S

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number in self._forwarded:
            for rank in _ranks_that_hear(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, number)
            return
        if time.monotonic() - self._heard_at < _DEAF_S:
            return
        self._heard_at = time.monotonic()
        self.received = signal.Signals(number)
        # Whatever it was, ranks get SIGTERM: it makes them save, also where a terminal was lost, and it
        # ends a Python that is still starting without the traceback that SIGINT leaves.
        raise self._raised(f"the launcher got {self.received.name}", signal.SIGTERM)


def _ranks_that_hear(number: int) -> list[int]:
    """Child processes that have set up what this signal does to them. One that is still starting would be
    ended by it, and has nothing to save."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, KeyError):
            lines = (entry / "status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (x.partition(":") for x in lines)}
            handled = int(status["SigCgt"], 16) | int(status["SigIgn"], 16)
            if int(status["PPid"]) == os.getpid() and handled >> (number - 1) & 1:
                found.append(int(entry.name))
    return found
