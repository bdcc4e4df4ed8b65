"""`torus2d`: reduce-scatter in rows, all-reduce in columns, all-gather in rows.

In: a buffer. Out: its sum. Horovod's and Sony's: no rank has more to do than another, and each
column carries its own chunk between the groups. Rows exchange directly, in one round each way. Where
groups differ in size, a rank of a small one owns several chunks and stands in as many columns.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm.algorithms.explicit import Explicit
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.member_sum import check_kind, choose_kind, member_rounds
from paceline.comm.algorithms.owners import Owners
from paceline.comm.algorithms.segments import Rounds, in_step
from paceline.comm.algorithms.staging import Staging
from paceline.comm.process_groups import ProcessGroups


class Torus2d(Explicit):
    name = "torus2d"
    least_segment_bytes = 2 * 1024 * 1024

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging | None = None,
        *,
        columns: str | None = None,
        batched: bool | None = None,
    ) -> None:
        """`columns`: how a column sums, one of `member_sum.KINDS`; None: by size."""
        super().__init__(groups, staging, batched=batched)
        check_kind("columns", columns)
        self._kind = columns
        self._row = self._layout.row_of(self._rank)
        width = len(self._layout.columns)
        self._owners = tuple(self._row[number % len(self._row)] for number in range(width))

    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        columns = self._layout.columns
        row = Owners(lane, segment, self._row, self._owners, self._rank)
        # By the mean size of a chunk, not this one's: all columns must take as many rounds.
        kind = self._kind or choose_kind(len(columns[0]), segment.nbytes // len(columns))
        parts = [
            member_rounds(
                kind, lane.fork(number + 1), row.chunks[number], columns[number], self._rank
            )
            for number in row.owned
        ]
        return _phases(row, parts)


def _phases(row: Owners, columns: list[Rounds]) -> Rounds:
    yield from row.reduce()
    yield from in_step(columns)
    yield from row.gather()
