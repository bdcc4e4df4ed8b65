"""`hierarchical`: reduce in each group to its master, sum among masters, broadcast in each group.

In: a buffer. Out: its sum. The paper's and Goyal's: 2(p−1) steps of a ring become 2(h−1) between h
groups, or one or two rounds where groups are few and buffers small. Segments follow one another, so
that the links between nodes stay busy while the groups add up and hand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.member_sum import check_kind, choose_kind, count_rounds, member_rounds
from paceline.comm.algorithms.rooted import Rooted
from paceline.comm.algorithms.segments import Rounds
from paceline.comm.algorithms.staging import Staging
from paceline.comm.algorithms.tree_shape import TreeShape, binomial, flat
from paceline.comm.process_groups import ProcessGroups

# Up to this a group's ranks send straight to the master; larger groups take a tree.
_FLAT_RANKS = 8


class Hierarchical(Explicit):
    name = "hierarchical"
    depth = 4
    least_segment_bytes = 2 * 1024 * 1024
    segment_bytes = 4 * 1024 * 1024

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging | None = None,
        *,
        masters: str | None = None,
        batched: bool | None = None,
    ) -> None:
        """`masters`: how they sum among themselves, one of `member_sum.KINDS`; None: by size."""
        super().__init__(groups, staging, batched=batched)
        check_kind(masters)
        self._kind = masters
        shapes = [_row_shape(group, group[0]) for group in self._layout.groups]
        mine = _row_shape(self._layout.row_of(self._rank), self._rank)
        # As many rounds in every group, whatever its size.
        self._shape = replace(mine, levels=max(shape.levels for shape in shapes))

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        rooted = Rooted(lane, segment, self._shape)
        masters = self._layout.masters
        kind = self._kind or choose_kind(len(masters), segment.nbytes)
        if self._rank in masters:
            among = member_rounds(kind, lane, segment, masters, self._rank)
        else:
            among = iter((None,) * count_rounds(kind, len(masters)))
        return _phases(rooted, among)


def _row_shape(row: Sequence[int], rank: int) -> TreeShape:
    return (flat if len(row) <= _FLAT_RANKS else binomial)(row, rank)


def _phases(rooted: Rooted, among: Rounds) -> Rounds:
    yield from rooted.reduce()
    yield from among
    yield from rooted.broadcast()
