"""Handles the signals that request a checkpoint, or a checkpoint and a stop.

SIGINT (Ctrl-C), SIGTERM (scheduler, torchrun) and SIGHUP (lost terminal) stop the run.
`checkpoint.on_sigusr1` and `checkpoint.on_sigusr2` define the meaning of SIGUSR1 and SIGUSR2. Signal
handlers only set flags, which the next step sends to all ranks. A second signal does not interrupt a
save.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from paceline.core.host import SignalContext, is_held_back, release

if TYPE_CHECKING:
    from paceline.config import CheckpointSettings

# The field of the exchanged signals for each stop request. If ranks received different signals, the
# first one in this order is used.
STOP_FIELDS = {
    "terminate": signal.SIGTERM,
    "hangup": signal.SIGHUP,
    "user2": signal.SIGUSR2,
    "user1": signal.SIGUSR1,
    "interrupt": signal.SIGINT,
}
# SIGTERM is last: if it has a handler, `cli.launch` assumes that all handlers are installed.
STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def user_signals(settings: CheckpointSettings, meaning: str) -> tuple[signal.Signals, ...]:
    """Returns which of SIGUSR1 and SIGUSR2 have the given meaning in the settings.

    The meaning `save` requests a save and continues; `stop` stops the run after a save.
    """
    known = {signal.SIGUSR1: settings.on_sigusr1, signal.SIGUSR2: settings.on_sigusr2}
    return tuple(number for number, set_to in known.items() if set_to == meaning)


class StopSignals(SignalContext):
    """A context in which signals set flags instead of ending the process."""

    def __init__(
        self, stops: Collection[signal.Signals] = STOPS, saves: Collection[signal.Signals] = ()
    ) -> None:
        """Creates the context. A SIGHUP that is ignored, as under nohup, stays ignored.

        Args:
            stops: Signals that stop the run.
            saves: Signals that request a checkpoint.
        """
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            stops = [number for number in stops if number is not signal.SIGHUP]
        super().__init__([*saves, *stops], self._note)
        self._saves = frozenset(saves)
        self.received: signal.Signals | None = None
        self.save_requested = False
        # True if a callback requests a stop. The next step sends the request to all ranks.
        self.requested = False

    @classmethod
    def of(cls, settings: CheckpointSettings) -> StopSignals:
        """Creates the context for all signals of a training run."""
        stops = [*user_signals(settings, "stop"), *STOPS]
        return cls(stops, user_signals(settings, "save"))

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._saves:
            self.save_requested = True
        elif self.received is None:
            self.received = signal.Signals(number)

    def take_save_request(self) -> bool:
        """Returns True if a save was requested since the last call."""
        requested, self.save_requested = self.save_requested, False
        return requested

    def stop_flags(self) -> dict[str, float]:
        """Returns the stop requests of this rank as fields of `comm.Signals`."""
        return {name: float(self.received is number) for name, number in STOP_FIELDS.items()}


def agreed_stop(sums: Sequence[float]) -> signal.Signals | None:
    """Returns the signal that stops all ranks, if any.

    `sums` counts, for each entry of `STOP_FIELDS` in order, the ranks that received its signal.
    """
    asked = zip(STOP_FIELDS.values(), sums, strict=True)
    return next((number for number, ranks in asked if ranks), None)


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Lets Ctrl-C end the process immediately inside the context, while there is nothing to save.

    Python's own handler would run only after the current call returns, but a call that waits for other
    ranks can take minutes.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def without_save_requests(settings: CheckpointSettings) -> Iterator[None]:
    """Ignores signals that request a save inside the context.

    By default these signals end the process, but before the first step and after the last step there is
    nothing to save. `paceline.__main__` blocks the signals until this context starts. Signals that were
    blocked stay ignored until the process ends.
    """
    before = {n: signal.signal(n, signal.SIG_IGN) for n in user_signals(settings, "save")}
    held = release(before)
    if not is_held_back(signal.SIGTERM):  # else the ranks meet first
        release(user_signals(settings, "stop"))
    try:
        yield
    finally:
        for number in before.keys() - held:
            signal.signal(number, before[number])
