"""Signals that ask a run to save, or to save and stop.

In: SIGINT (Ctrl-C), SIGTERM (scheduler, torchrun), SIGHUP (a lost terminal), and SIGUSR1 and SIGUSR2,
whose meaning `checkpoint.on_sigusr1` and `checkpoint.on_sigusr2` set. Out: flags that the step reads and
shares with the other ranks. Handlers only take note: the save that follows is never broken, not by a
second signal either.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from paceline.core.signal_context import SignalContext

# The field of the exchange in which each request to stop travels. Where ranks got different ones, the
# first in this order counts.
STOP_FIELDS = {
    "terminate": signal.SIGTERM,
    "hangup": signal.SIGHUP,
    "user2": signal.SIGUSR2,
    "user1": signal.SIGUSR1,
    "interrupt": signal.SIGINT,
}
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalSettings(Protocol):
    """What SIGUSR1 and SIGUSR2 mean, `save` (and go on) or `stop` (after a save)."""

    @property
    def on_sigusr1(self) -> str: ...

    @property
    def on_sigusr2(self) -> str: ...


def user_signals(settings: SignalSettings, meaning: str) -> tuple[signal.Signals, ...]:
    """Those of SIGUSR1 and SIGUSR2 that mean `save`, or `stop`."""
    known = {signal.SIGUSR1: settings.on_sigusr1, signal.SIGUSR2: settings.on_sigusr2}
    return tuple(number for number, set_to in known.items() if set_to == meaning)


class StopSignals(SignalContext):
    """A context in which the signals are noted instead of obeyed at once."""

    def __init__(
        self,
        stops: Collection[signal.Signals] = STOPS,
        saves: Collection[signal.Signals] = (),
    ) -> None:
        """A SIGHUP that is ignored stays ignored: that is what nohup is for."""
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops = [number for number in stops if number is not signal.SIGHUP]
        super().__init__([*stops, *saves], self._note)
        self._saves = frozenset(saves)
        self.received: signal.Signals | None = None
        self.save_requested = False

    @classmethod
    def of(cls, settings: SignalSettings) -> StopSignals:
        """All signals of a training run."""
        stops = [*STOPS, *user_signals(settings, "stop")]
        return cls(stops, user_signals(settings, "save"))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._saves:
            self.save_requested = True
        elif self.received is None:
            self.received = signal.Signals(number)

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        if not self.save_requested:
            return False
        # Only now: a request that arrives in between is served by the same save.
        self.save_requested = False
        return True

    def stop_flags(self) -> dict[str, float]:
        """This rank's request to stop, by field of the exchange."""
        return {name: float(self.received is number) for name, number in STOP_FIELDS.items()}


def agreed_stop(sums: Sequence[float]) -> signal.Signals | None:
    """The signal that all ranks obey, from the sums over ranks in the order of `STOP_FIELDS`."""
    asked = zip(STOP_FIELDS.values(), sums, strict=True)
    return next((number for number, ranks in asked if ranks), None)


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


@contextmanager
def without_save_requests(settings: SignalSettings) -> Iterator[None]:
    """Ignores the signals that ask for a save: by default they end a process, and before the first step
    and after the last there is nothing to save. `StopSignals` listens to them in between."""
    before = {n: signal.signal(n, signal.SIG_IGN) for n in user_signals(settings, "save")}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
