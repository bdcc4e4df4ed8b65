"""`ring`: all ranks in one ring, neighbours on a node side by side (see `RingRounds`).

In: a buffer. Out: its sum, after 2(p−1) rounds in which every link carries 1/p of a segment. Best for
large buffers on links of equal speed.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.ring_rounds import RingRounds
from paceline.comm.algorithms.segments import Rounds


class Ring(Explicit):
    name = "ring"

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        return RingRounds(lane, segment, self._layout.order, self._rank).rounds()
