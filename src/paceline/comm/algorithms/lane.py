"""`Lane`: the messages of one segment of a buffer, on its way through an algorithm.

In: tensors to send and tensors to receive into. Out: a `Receipt` for each round's arrivals. Gloo sends a
message only after its receiver has asked for it, so receives are posted as early as the algorithm knows
them. NCCL instead runs messages in the order of posting, so there they are held back and go off in one
batch with the sends, when a round waits for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm.algorithms.staging import Staging

# Tags that lie between two segments' lanes: room for the columns of a torus.
_TAGS_PER_LANE = 4096


class Lane:
    """One tag on one process group. What is sent and received on it stays in order."""

    def __init__(
        self,
        group: ProcessGroup,
        staging: Staging,
        number: int,
        *,
        batched: bool,
        part: int = 0,
        turn: int = 0,
    ) -> None:
        """`turn`: which segment of the buffer this is, for those that share out work by it."""
        assert part < _TAGS_PER_LANE
        self.turn = turn
        self._group = group
        self._staging = staging
        self._number = number
        self._part = part
        self._tag = number * _TAGS_PER_LANE + part
        self.batched = batched
        self._sends: list[Any] = []
        self._held: list[dist.P2POp] = []
        self._forks: list[Lane] = []

    def fork(self, part: int) -> Lane:
        """A lane beside this one, for messages between the same ranks that must not mix."""
        lane = Lane(self._group, self._staging, self._number, batched=self.batched, part=part)
        self._forks.append(lane)
        return lane

    def scratch(
        self, name: str, length: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Memory that belongs to this lane until the segment is through."""
        place = f"{self._number}.{self._part}.{name}"
        return self._staging.take(place, length, dtype or like.dtype, like.device)

    def send(self, tensor: Tensor, to: int) -> None:
        """Starts a message; `tensor` must keep its content until `finish`, or until causality
        tells that it has arrived."""
        if tensor.numel() == 0:
            return
        if self.batched:
            self._held.append(self._op(dist.isend, tensor, to))
        else:
            self._sends.append(dist.isend(tensor, group=self._group, group_dst=to, tag=self._tag))

    def expect(self, arrivals: Sequence[tuple[Tensor, int]]) -> Receipt:
        """Asks for the messages (into, from) of one later round; the empty ones never travel."""
        return Receipt(self, arrivals)

    def finish(self) -> None:
        """Waits until all that was sent has left its memory."""
        self._flush([])
        for work in self._sends:
            work.wait()
        for fork in self._forks:
            fork.finish()
        self._sends, self._forks = [], []

    def _post(self, tensor: Tensor, source: int) -> Any:
        return dist.irecv(tensor, group=self._group, group_src=source, tag=self._tag)

    def _op(self, kind: Any, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self._group, group_peer=peer, tag=self._tag)

    def _flush(self, arrivals: Sequence[tuple[Tensor, int]]) -> None:
        batch = self._held + [self._op(dist.irecv, into, source) for into, source in arrivals]
        self._held = []
        if batch:
            for work in dist.batch_isend_irecv(batch):
                work.wait()


class DryLane(Lane):
    """Sends nothing: notes with whom a rank exchanges messages."""

    def __init__(self, staging: Staging, peers: set[int]) -> None:
        self.turn, self.batched, self.peers = 0, False, peers
        self._staging, self._number, self._part = staging, 0, 0

    def fork(self, part: int) -> Lane:
        return DryLane(self._staging, self.peers)

    def send(self, tensor: Tensor, to: int) -> None:
        if tensor.numel():
            self.peers.add(to)

    def finish(self) -> None:
        """Nothing is under way."""

    def _post(self, tensor: Tensor, source: int) -> Any:
        self.peers.add(source)


class Receipt:
    """What one round waits for, in the order given."""

    def __init__(self, lane: Lane, arrivals: Sequence[tuple[Tensor, int]]) -> None:
        self._lane = lane
        self._tensors = [into for into, _ in arrivals]
        self._works: list[Any] = []
        self._open = [(into, source) for into, source in arrivals if into.numel()]
        if not lane.batched:
            self._works = [
                lane._post(into, source) if into.numel() else None for into, source in arrivals
            ]

    def take(self, number: int) -> Tensor:
        """Waits for one message and returns the tensor it filled."""
        if self._lane.batched:
            # All of a round at once: in parts, three ranks could wait for one another in a circle.
            self._lane._flush(self._open)
            self._open = []
        elif self._works[number] is not None:
            self._works[number].wait()
            self._works[number] = None
        return self._tensors[number]

    def arrivals(self, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
        """The tensors in turn, each once it is filled."""
        for number in range(first, len(self._tensors) if stop is None else stop):
            yield self.take(number)

    def take_all(self) -> None:
        for _ in self.arrivals():
            pass
