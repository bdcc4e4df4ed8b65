"""`Explicit`: what the algorithms built from messages have in common.

In: a buffer. Out: its segments sent through the algorithm's rounds, several under way at once. A buffer
is cut into as many segments as can be under way, unless they would be too short to be worth their
messages; and into more where they would be too long for the staging memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.algorithms.all_reduce import check_buffer
from paceline.comm.algorithms.lane import DryLane, Lane
from paceline.comm.algorithms.segments import Rounds, bounds, run_segments
from paceline.comm.algorithms.staging import Staging
from paceline.comm.process_groups import ProcessGroups
from paceline.core.errors import CommError

# Elements of a buffer that takes an algorithm's way for long ones.
_LONG = 1 << 24


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

    def peers(self) -> set[int]:
        """The ranks with which this rank exchanges messages, found by dry runs: some algorithms have
        other rounds for short buffers than for long ones."""
        peers: set[int] = set()
        for length in (4 * self._groups.world_size, _LONG):
            segment = torch.zeros(length, device="meta")
            for _ in self.rounds(segment, DryLane(Staging(), peers)):
                pass
        return peers

    def connect(self) -> None:
        """Opens NCCL's connections to all peers. All ranks call this at the same point.

        NCCL connects two ranks at their first message, and both must then post the same sends and
        receives in one batch. The batches of an algorithm differ between its ranks: the root of a tree
        receives and later sends, its children do both at once. So each pair connects beforehand, by a
        message each way; pairs are taken in one order, and none waits in a circle.
        """
        group = self._groups.world
        if group is None or self._groups.backend != "nccl":
            return
        device = torch.device("cuda", torch.cuda.current_device())
        out, into = torch.zeros(1, device=device), torch.zeros(1, device=device)
        rank = self._rank
        for peer in sorted(self.peers(), key=lambda peer: (min(rank, peer), max(rank, peer))):
            pair = [
                dist.P2POp(dist.isend, out, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, into, group=group, group_peer=peer),
            ]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

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
