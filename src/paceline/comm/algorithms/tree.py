"""`tree`: reduce up a binomial tree of all ranks, broadcast down (see `Rooted`).

In: a buffer. Out: its sum. Few messages, each of a whole segment: for small buffers.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.rooted import Rooted
from paceline.comm.algorithms.segments import Rounds
from paceline.comm.algorithms.staging import Staging
from paceline.comm.algorithms.tree_shape import binomial
from paceline.comm.process_groups import ProcessGroups


class Tree(Explicit):
    name = "tree"
    segment_bytes = 4 * 1024 * 1024

    def __init__(
        self, groups: ProcessGroups, staging: Staging | None = None, *, batched: bool | None = None
    ) -> None:
        super().__init__(groups, staging, batched=batched)
        self._shape = binomial(groups.layout.order, groups.rank)

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        rooted = Rooted(lane, segment, self._shape)
        return _up_and_down(rooted)


def _up_and_down(rooted: Rooted) -> Rounds:
    yield from rooted.reduce()
    yield from rooted.broadcast()
