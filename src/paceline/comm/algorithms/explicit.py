"""`Explicit`: what the algorithms built from messages have in common.

In: a buffer. Out: its segments sent through the algorithm's rounds, several under way at once. A buffer
is cut into as many segments as can be under way, unless they would be too short to be worth their
messages; and into more where they would be too long for the staging memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from paceline.comm.algorithms.all_reduce import check_buffer
from paceline.comm.algorithms.lane import Lane
from paceline.comm.algorithms.segments import Rounds, bounds, run_segments
from paceline.comm.algorithms.staging import Staging
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError


class Explicit(ABC):
    """An all-reduce in rounds of messages."""

    name: str
    depth = 2
    least_segment_bytes = 1024 * 1024
    segment_bytes = 8 * 1024 * 1024

    def __init__(
        self,
        groups: ProcessGroups,
        staging: Staging | None = None,
        *,
        batched: bool | None = None,
    ) -> None:
        """`batched`: each round's messages go off together; None means where the backend is NCCL."""
        self._groups = groups
        self._rank = groups.rank
        self._layout = groups.layout
        self._staging = staging or Staging()
        self._batched = groups.backend == "nccl" if batched is None else batched

    @abstractmethod
    def rounds(self, segment: Tensor, lane: Lane) -> Rounds:
        """The rounds of one segment; before the first, all its receives are posted."""

    def all_reduce(self, buffer: Tensor) -> None:
        """Replaces `buffer` by its sum over ranks."""
        check_buffer(buffer)
        group = self._groups.world
        if group is None or self._groups.world_size == 1 or buffer.numel() == 0:
            return
        if self._groups.backend == "gloo" and buffer.device.type != "cpu":
            raise CommError(
                f"{self.name} over Gloo cannot send memory of {buffer.device}",
                "use HybridAllReduce, which copies it to the host",
            )
        cuts = self._cuts(buffer)
        count = len(cuts)

        def start(segment: int, number: int) -> Rounds:
            low, high = cuts[segment]
            lane = Lane(group, self._staging, number, batched=self._batched, turn=segment)
            return _finished(self.rounds(buffer[low:high], lane), lane)

        run_segments(count, min(self.depth, count), start)

    def _cuts(self, buffer: Tensor) -> list[tuple[int, int]]:
        """Where the buffer is cut into segments."""
        if self._batched:
            # Without tags, as over NCCL, the messages of two segments could not be told apart.
            return [(0, buffer.numel())]
        most = min(self.depth, max(1, buffer.nbytes // self.least_segment_bytes))
        return bounds(buffer.numel(), max(most, -(-buffer.nbytes // self.segment_bytes)))


def _finished(rounds: Rounds, lane: Lane) -> Rounds:
    yield from rounds
    lane.finish()
