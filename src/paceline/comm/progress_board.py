"""`ProgressBoard`: how far this rank has come, for whoever asks from another thread.

In: the calls of an exchange's observer, and the collectives of the group. Out: a `Standing`, small enough
to be posted to the store every few seconds, and comparable between ranks: all of them make the same
calls in the same order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Standing:
    """Of the exchange: the step (from 0) and how many buffers it has begun and ended. Of the group: how
    many collectives this rank has entered between steps, and the name of the one that it is in."""

    step: int = -1
    begun: int = 0
    ended: int = 0
    calls: int = 0
    call: str = ""
    computes: bool = False

    @property
    def in_exchange(self) -> bool:
        return self.begun > self.ended

    @property
    def waits(self) -> bool:
        """Whether this rank needs others to go on."""
        return self.in_exchange or bool(self.call)

    @property
    def doing(self) -> str:
        """In words, for the others."""
        if self.in_exchange:
            return f"in buffer {self.ended + 1} of step {self.step + 1}"
        if self.call:
            return f"in {self.call}"
        if self.computes:
            return f"computing step {self.step + 1}"
        return f"after step {self.step + 1}" if self.step >= 0 else "before the first step"

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Standing:
        return cls(**json.loads(text))


class ProgressBoard:
    """An `ExchangeObserver`. Threads may write and read at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing = Standing()

    @property
    def standing(self) -> Standing:
        with self._lock:
            return self._standing

    def _note(self, **changes: int | str | bool) -> None:
        with self._lock:
            self._standing = replace(self._standing, **changes)  # type: ignore[arg-type]

    def step_begun(self, step: int) -> None:
        self._note(step=step, begun=0, ended=0, computes=True)

    def sent(self, buffer: int) -> None:
        """What waits on this rank alone stalls nobody."""

    def begun(self, buffer: int) -> None:
        self._note(begun=buffer + 1)

    def ended(self, buffer: int) -> None:
        self._note(ended=buffer + 1)

    def step_ended(self, exposed_s: float) -> None:
        self._note(computes=False)

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """A collective of the group. One that breaks is never left: what follows is a rank's end."""
        now = self.standing
        # Inside a step ranks may differ, where one replays a recording; its buffers are counted.
        self._note(calls=now.calls + (not now.computes), call=call)
        yield
        self._note(call="")
