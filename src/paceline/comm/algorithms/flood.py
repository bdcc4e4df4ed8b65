"""`Flood`: every member sends all it has to every other, and each adds up for itself.

In: a small segment on every member. Out: its sum on all of them after a single round. All add in the
order of the members, in fp32, so that all come to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.algorithms.accumulate import is_half
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.segments import Rounds


class Flood:
    """One segment's single round."""

    def __init__(self, lane: Lane, segment: Tensor, members: Sequence[int], rank: int) -> None:
        self._lane = lane
        self._segment = segment
        self._members = members
        self._at = members.index(rank)
        length = segment.numel()
        room = lane.scratch("flood", length * len(members), segment)
        self._rows = [room[length * at : length * (at + 1)] for at in range(len(members))]
        self._others = [at for at in range(len(members)) if at != self._at]
        self._receipt = lane.expect([(self._rows[at], members[at]) for at in self._others])

    def rounds(self) -> Rounds:
        # Sent from a copy: the sum may be complete here while a slow member still receives.
        mine = self._rows[self._at]
        mine.copy_(self._segment)
        for at in (*self._others[self._at :], *self._others[: self._at]):
            self._lane.send(mine, self._members[at])
        yield
        total = self._segment
        if is_half(total) and len(self._rows) > 2:
            total = self._lane.scratch("sum", total.numel(), total, torch.float32)
        for at, row in enumerate(self._rows):
            if at != self._at:
                self._receipt.take(at - (at > self._at))
            if at == 0:
                total.copy_(row)
            else:
                total.add_(row)
        if total is not self._segment:
            self._segment.copy_(total)
        yield
