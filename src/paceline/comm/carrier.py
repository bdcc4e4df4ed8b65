"""`Carrier`: who takes a message of gradients to the other ranks.

In: a piece of a flat buffer, with the algorithm and wire format that the plan names for it. Out: its sum
over ranks, in place, once the returned function has been called. A carrier that overlaps returns at
once, so that backward goes on; `DirectCarrier` is the backend's own all-reduce, in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from paceline.comm.group import Group

Wait = Callable[[], None]


class Carrier(Protocol):
    """Every rank sends the same messages in the same order."""

    @property
    def overlaps(self) -> bool:
        """Whether `send` returns before the message has arrived."""
        ...

    def send(self, message: Tensor, algorithm: str, wire: str) -> Wait: ...


class DirectCarrier:
    """The group's own all-reduce, in the number format that the buffer has."""

    overlaps = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def send(self, message: Tensor, algorithm: str, wire: str) -> Wait:
        self._group.all_reduce_sum(message)
        return lambda: None
