"""`ExchangeObserver`: who wants to know how a step's exchange goes, such as watchdog and timeline.

In: calls of the exchange and its carrier, with the index of a buffer in `plan.buffers`. Out: nothing; an
observer never changes what is exchanged, and it must be quick, for the exchange waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ExchangeObserver(Protocol):
    """Of one step: `step_begun`, for every buffer `sent`, `begun`, `ended`, then `step_ended`.

    `begun` and `ended` come from the communication thread where the carrier has one, so they may overlap
    with calls of the main thread. Where the device carries the messages (NCCL) they mean "queued" and
    "its wait is queued". A replayed CUDA graph calls `step_begun` and `step_ended` alone.
    """

    def step_begun(self, step: int) -> None:
        """The optimizer step, from 0; before the first micro-step."""
        ...

    def sent(self, buffer: int) -> None:
        """The buffer is full on this rank and handed to the carrier."""
        ...

    def begun(self, buffer: int) -> None:
        """Its first message goes to the other ranks."""
        ...

    def ended(self, buffer: int) -> None:
        """Its sum over ranks is there."""
        ...

    def step_ended(self, exposed_s: float) -> None:
        """All sums are there; the step waited this long for them after its own backward pass.

        On a GPU the last known time, which may be of an earlier step: asking would wait.
        """
        ...


class NoObserver:
    """Nobody looks."""

    def step_begun(self, step: int) -> None:
        return

    def sent(self, buffer: int) -> None:
        return

    def begun(self, buffer: int) -> None:
        return

    def ended(self, buffer: int) -> None:
        return

    def step_ended(self, exposed_s: float) -> None:
        return


class Observers:
    """Several observers as one, told in the order given."""

    def __init__(self, observers: Sequence[ExchangeObserver]) -> None:
        self._observers = tuple(observers)

    def step_begun(self, step: int) -> None:
        for observer in self._observers:
            observer.step_begun(step)

    def sent(self, buffer: int) -> None:
        for observer in self._observers:
            observer.sent(buffer)

    def begun(self, buffer: int) -> None:
        for observer in self._observers:
            observer.begun(buffer)

    def ended(self, buffer: int) -> None:
        for observer in self._observers:
            observer.ended(buffer)

    def step_ended(self, exposed_s: float) -> None:
        for observer in self._observers:
            observer.step_ended(exposed_s)
