"""`Carrier`: who takes the messages of a buffer to the other ranks.

In: pieces of flat buffers, each with the algorithm and wire format that the plan names for it. Out: their
sums over ranks, in place, once the returned function has been called. A carrier that overlaps returns
at once, so that backward goes on; `DirectCarrier` is the backend's own all-reduce in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.comm.group import Group

Wait = Callable[[], None]
Tell = Callable[[], None]


class Piece(NamedTuple):
    """One message: a stretch of a flat buffer. `wire` is a format's name, or `auto`: as the tensor is."""

    tensor: Tensor
    algorithm: str
    wire: str


class Carrier(Protocol):
    """Every rank sends the same buffers in the same order."""

    @property
    def name(self) -> str:
        """For display and record."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether `send` returns before the buffer has arrived."""
        ...

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can hold `send` and the wait for it."""
        ...

    def send(self, pieces: Sequence[Piece], begun: Tell, ended: Tell) -> Wait:
        """The pieces of one buffer. `begun` and `ended` are called when it goes and when it is there."""
        ...

    def close(self) -> None:
        """Gives threads and groups back; what is still on its way is left alone."""
        ...


class DirectCarrier:
    """The group's own all-reduce, in the number format that the buffer has."""

    name = "direct"
    overlaps = False
    recordable = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def send(self, pieces: Sequence[Piece], begun: Tell, ended: Tell) -> Wait:
        begun()
        for piece in pieces:
            self._group.all_reduce_sum(piece.tensor, wait=False)
        ended()
        return lambda: None

    def close(self) -> None:
        """Nothing is held."""
