"""`HalvingRounds`: recursive halving, then doubling (Rabenseifner's).

In: a segment on every member. Out: its sum on all of them, after 2·log2(n) rounds. Neighbours exchange
the largest parts, so that what crosses between nodes is small. Where n is no power of two, some members
first hand all they have to a neighbour, who answers with the result.

With 16-bit messages the sums stay in fp32 for as long as a rank keeps them; only what it sends, and at
last its own part, is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.accumulate import is_half
from paceline.comm.algorithms.lane import Lane, Receipt
from paceline.comm.algorithms.segments import Rounds


class HalvingRounds:
    """One segment's way."""

    def __init__(self, lane: Lane, segment: Tensor, members: Sequence[int], rank: int) -> None:
        self._lane = lane
        self._segment = segment
        self._sums = segment
        core = 1 << (len(members).bit_length() - 1)
        extra = len(members) - core
        self._folds = extra > 0
        at = members.index(rank)
        self._levels = core.bit_length() - 1
        # Of the first 2·extra members every even one folds into its odd neighbour.
        self._partner: int | None = members[at ^ 1] if at < 2 * extra else None
        self._idle = at < 2 * extra and at % 2 == 0
        if self._idle:
            assert self._partner is not None
            self._result = lane.expect([(segment, self._partner)])
            return
        if self._partner is not None:
            inbox = lane.scratch("folded", segment.numel(), segment)
            self._folded = lane.expect([(inbox, self._partner)])
        place = at // 2 if at < 2 * extra else at - extra
        self._peers = [
            members[peer * 2 + 1 if peer < extra else peer + extra]
            for peer in (place ^ (1 << level) for level in range(self._levels))
        ]
        self._plan(place)

    def _plan(self, place: int) -> None:
        """What each level keeps, gives away and waits for."""
        low, high = 0, self._segment.numel()
        inbox = self._lane.scratch("halves", high + self._levels, self._segment)
        used = 0
        self._kept: list[tuple[int, int]] = []
        self._given: list[tuple[int, int]] = []
        self._halves: list[Receipt] = []
        for level, peer in enumerate(self._peers):
            middle = (low + high) // 2
            lower, upper = (low, middle), (middle, high)
            (low, high), given = (upper, lower) if place >> level & 1 else (lower, upper)
            # Each level has room of its own: a fast peer is a level ahead.
            self._halves.append(self._lane.expect([(inbox[used : used + high - low], peer)]))
            used += high - low
            self._kept.append((low, high))
            self._given.append(given)
        self._own = (low, high)
        self._doubles = [
            self._lane.expect([(self._segment[given[0] : given[1]], peer)])
            for given, peer in zip(reversed(self._given), reversed(self._peers), strict=True)
        ]

    def rounds(self) -> Rounds:
        if self._folds:
            if self._idle:
                self._lane.send(self._segment, self._receiver())
            yield
        if self._idle:
            for _ in range(2 * self._levels + 1):
                yield
            self._result.take_all()
            return
        self._begin_sum()
        yield from self._halve()
        yield from self._double()
        if self._folds:
            if self._partner is not None:
                self._lane.send(self._segment, self._partner)
            yield

    def _receiver(self) -> int:
        assert self._partner is not None
        return self._partner

    def _begin_sum(self) -> None:
        """From here on the sums are in fp32, or in the segment itself where that is fp32."""
        arrival = None if self._partner is None else self._folded.take(0)
        if is_half(self._segment):
            length = self._segment.numel()
            self._sums = self._lane.scratch("sums", length, self._segment, torch.float32)
            self._sums.copy_(self._segment)
        if arrival is not None:
            self._sums.add_(arrival)

    def _halve(self) -> Rounds:
        for peer, (first, last), (low, high), receipt in zip(
            self._peers, self._given, self._kept, self._halves, strict=True
        ):
            self._round(first, last)
            self._lane.send(self._segment[first:last], peer)
            yield
            self._sums[low:high].add_(receipt.take(0))
        self._round(*self._own)

    def _round(self, low: int, high: int) -> None:
        """Brings a stretch of the sums into the format in which it travels."""
        if self._sums is not self._segment:
            self._segment[low:high].copy_(self._sums[low:high])

    def _double(self) -> Rounds:
        low, high = self._own
        for peer, (first, last), receipt in zip(
            reversed(self._peers), reversed(self._given), self._doubles, strict=True
        ):
            self._lane.send(self._segment[low:high], peer)
            yield
            receipt.take_all()
            low, high = min(low, first), max(high, last)
