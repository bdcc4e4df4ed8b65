"""`hierarchical`: reduce in each group to its master, sum among masters, broadcast in each group.

In: a buffer. Out: its sum. The paper's and Goyal's: 2(p−1) steps of a ring become 2(h−1) between h
groups, or one or two rounds where groups are few and buffers small. Segments follow one another, so
that the links between nodes stay busy while the groups add up and hand out; and the ranks of a group
take turns as its master, segment by segment, so that no process has all the work.
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
    depth = 8
    least_segment_bytes = 512 * 1024
    segment_bytes = 2 * 1024 * 1024

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
        check_kind("masters", masters)
        self._kind = masters
        levels = max(_row_shape(group, group[0]).levels for group in self._layout.groups)
        row = self._layout.row_of(self._rank)
        # As many rounds in every group, whatever its size; a shape for each master.
        self._shapes = [
            replace(_row_shape((*row[at:], *row[:at]), self._rank), levels=levels)
            for at in range(len(row))
        ]

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        column = lane.turn % len(self._layout.columns)
        masters = self._layout.columns[column]
        shape = self._shapes[column % len(self._shapes)]
        rooted = Rooted(lane, segment, shape)
        kind = self._kind or choose_kind(len(masters), segment.nbytes)
        count = count_rounds(kind, len(masters))
        if self._rank in masters:
            among = member_rounds(kind, lane, segment, masters, self._rank)
        else:
            among = iter((None,) * count)
        return _phases(rooted, shape.levels, among, count)


def _row_shape(row: Sequence[int], rank: int) -> TreeShape:
    return (flat if len(row) <= _FLAT_RANKS else binomial)(row, rank)


def _phases(rooted: Rooted, levels: int, among: Rounds, count: int) -> Rounds:
    yield from _without_last_pause(rooted.reduce(), levels + 1)
    yield from _without_last_pause(among, count)
    yield from rooted.broadcast()


def _without_last_pause(rounds: Rounds, count: int) -> Rounds:
    """A phase ends in the round in which the next begins, so that no other segment comes between."""
    for _ in range(count - 1):
        next(rounds)
        yield
    for _ in rounds:
        pass
