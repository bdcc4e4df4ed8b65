"""`RingRounds`: reduce-scatter and all-gather around a ring (Baidu's).

In: a segment on every member. Out: its sum on all of them, after 2(n−1) rounds of 1/n of the segment.
A partial sum is rounded to the segment's format at every hop, because that is what travels; its last
owner hands on the very bits that it keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.segments import Rounds, bounds


class RingRounds:
    """One segment's two ways around the ring."""

    def __init__(self, lane: Lane, segment: Tensor, members: Sequence[int], rank: int) -> None:
        self._lane = lane
        self._size = size = len(members)
        self._at = at = members.index(rank)
        self._next = members[(at + 1) % size]
        before = members[at - 1]
        cuts = bounds(segment.numel(), size)
        self._chunks = [segment[low:high] for low, high in cuts]
        inbox = lane.scratch("ring", segment.numel(), segment)
        partial = [inbox[low:high] for low, high in cuts]
        self._partials = [
            lane.expect([(partial[(at - step - 1) % size], before)]) for step in range(size - 1)
        ]
        self._results = [
            lane.expect([(self._chunks[(at - step) % size], before)]) for step in range(size - 1)
        ]

    def rounds(self) -> Rounds:
        at, size = self._at, self._size
        self._lane.send(self._chunks[at], self._next)
        yield
        for step, receipt in enumerate(self._partials):
            chunk = self._chunks[(at - step - 1) % size]
            chunk.add_(receipt.take(0))
            # The last of these is complete, and with it the way of the results begins.
            self._lane.send(chunk, self._next)
            yield
        for step, receipt in enumerate(self._results):
            result = receipt.take(0)
            if step < size - 2:
                self._lane.send(result, self._next)
            yield
