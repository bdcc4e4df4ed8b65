"""`Owners`: each chunk of a segment is summed by its owner, then handed to all.

In: a segment on every member, and for each chunk the rank that owns it. Out: after `reduce`, the sums in
the owners' chunks; after `gather`, all of them everywhere. Each half is one round of direct messages:
with every member an owner this is reduce-scatter and all-gather, with a few it is a parameter server.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.algorithms.accumulate import add_arrivals
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.segments import Rounds, bounds


class Owners:
    """One segment's way to its owners and back."""

    def __init__(
        self, lane: Lane, segment: Tensor, members: Sequence[int], owners: Sequence[int], rank: int
    ) -> None:
        self._lane = lane
        self._rank = rank
        self._owners = owners
        at = members.index(rank)
        # Each rank begins with its successor, so that not all of them write to the first at once.
        self._others = [*members[at + 1 :], *members[:at]]
        self.chunks = [segment[low:high] for low, high in bounds(segment.numel(), len(owners))]
        self.owned = [number for number, owner in enumerate(owners) if owner == rank]
        # Who comes before this rank has it early in its own turn.
        self._sums = lane.expect(
            [
                (self._inbox(number, place), source)
                for number in self.owned
                for place, source in enumerate(reversed(self._others))
            ]
        )
        self._results = lane.expect(
            [(self.chunks[number], owner) for number, owner in enumerate(owners) if owner != rank]
        )

    def _inbox(self, number: int, place: int) -> Tensor:
        chunk = self.chunks[number]
        room = self._lane.scratch(f"chunk{number}", chunk.numel() * len(self._others), chunk)
        return room[chunk.numel() * place : chunk.numel() * (place + 1)]

    def reduce(self) -> Rounds:
        for other in self._others:
            for chunk, owner in zip(self.chunks, self._owners, strict=True):
                if owner == other:
                    self._lane.send(chunk, other)
        yield
        count = len(self._others)
        for place, number in enumerate(self.owned):
            arrivals = self._sums.arrivals(place * count, (place + 1) * count)
            add_arrivals(self.chunks[number], arrivals, count, self._lane)
        yield

    def gather(self) -> Rounds:
        for other in self._others:
            for number in self.owned:
                self._lane.send(self.chunks[number], other)
        yield
        self._results.take_all()
        yield
