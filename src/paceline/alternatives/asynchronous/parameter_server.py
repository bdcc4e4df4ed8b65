"""Implements a parameter server, and limits how far its workers can be apart.

Every rank is a worker. The first `servers` ranks, or all ranks, also hold a shard of the weights,
which a thread updates. Workers push gradients and pull weights without a barrier. A server applies
each push at arrival and acknowledges it. Messages go through host memory over Gloo, which can receive
from any rank.

`Clock` bounds the distance between ranks: a rank begins step n after all ranks have finished step
n − 1 − bound (stale synchronous parallel, Ho et al. 2013).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.group import Group
from paceline.core.errors import CommError

# Applies a shard's gradient at a learning rate; returns False if it skips a non-finite gradient.
Apply = Callable[[Tensor, float], bool]
_HEADER, _BODY, _REPLY, _ACK = range(1, 5)
_PULL, _PUSH, _BYE = range(3)
_END_WAIT_S, _LEAVE_WAIT_S = 5.0, 1.0
# Larger staleness values are counted together.
MOST_STALENESS = 64


class Shard(NamedTuple):
    """A part of the model's weights that `rank` serves: elements `start` to `stop` of the flat weights.

    `tensors` has the indices of the tensors in this part.
    """

    rank: int
    start: int
    stop: int
    tensors: tuple[int, ...]


def cut_shards(sizes: Sequence[int], ranks: int, servers: int) -> list[Shard]:
    """Divides the model's tensors among servers; no tensor is split, so layer-wise optimizers work.

    Assigns tensors from the largest to the smallest, each to the server with the least elements.

    Args:
        sizes: Number of elements in each tensor.
        ranks: Number of ranks.
        servers: Number of servers; 0 means all ranks.

    Returns:
        One shard per server.
    """
    count = min(servers or ranks, ranks)
    dealt: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = filled.index(min(filled))
        dealt[least].append(number)
        filled[least] += sizes[number]
    shards, start = [], 0
    for rank, (numbers, length) in enumerate(zip(dealt, filled, strict=True)):
        shards.append(Shard(rank, start, start + length, tuple(sorted(numbers))))
        start += length
    return shards


class Pushed(NamedTuple):
    """The result of sending a gradient to the parameter servers (a push).

    Attributes:
        staleness: Number of updates by other ranks between this rank's pull and push; the maximum over
            all shards.
        refused: True if the gradient was not finite in at least one shard. Such a shard skips the push.
    """

    staleness: int
    refused: bool


class ParameterServer:
    """Sends gradients to all servers, pulls weights, and serves this rank's shard in a thread.

    All ranks create it together, because it creates a process group.

    Args:
        group: Group of all ranks.
        shards: Result of `cut_shards`.
    """

    def __init__(self, group: Group, shards: Sequence[Shard]) -> None:
        self._group, self.shards = group, shards
        self.process_group: Any = dist.new_group(backend="gloo")
        self._own = next((shard for shard in shards if shard.rank == group.rank), None)
        self._lock = threading.Lock()
        self._version = 0
        self._weights: Tensor | None = None
        self._apply: Apply | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Last messages, kept alive until they are sent.
        self._goodbyes: list[Any] = []
        # Version of each shard in the last pull.
        self._pulled = [0] * len(shards)

    def serve(self, weights: Tensor, apply: Apply) -> None:
        """Starts the thread that serves this rank's shard.

        Args:
            weights: This shard's slice of the flat weights.
            apply: A function that applies a gradient to `weights` in place.
        """
        if self._own is None:
            return
        self._weights, self._apply = weights, apply
        self._thread = threading.Thread(target=self._serve, name="paceline-server", daemon=True)
        self._thread.start()

    def pull(self, into: Tensor) -> None:
        """Writes the current weights of all shards to `into`."""
        self._check()
        replies = []
        for number, shard in enumerate(self.shards):
            if shard is self._own:
                assert self._weights is not None
                with self._lock:
                    into[shard.start : shard.stop].copy_(self._weights)
                    self._pulled[number] = self._version
                continue
            reply = torch.empty(2 + shard.stop - shard.start)
            self._send_header(shard.rank, _PULL)
            replies.append((number, shard, reply, self._receive(reply, shard.rank, _REPLY)))
        for number, shard, reply, work in replies:
            work.wait()
            self._pulled[number] = _version_of(reply[:2])
            into[shard.start : shard.stop].copy_(reply[2:])

    def push(self, gradient: Tensor, rate: float) -> Pushed:
        """Applies this rank's gradient to all shards and waits until all have applied it.

        Args:
            gradient: Flat gradient of all shards.
            rate: Learning rate.

        Returns:
            The staleness of the push, and whether a shard has refused it.
        """
        self._check()
        answers: list[tuple[int, bool]] = []
        waits = []
        for number, shard in enumerate(self.shards):
            part = gradient[shard.start : shard.stop]
            if shard is self._own:
                answers.append(self._take(part, self._pulled[number], rate))
                continue
            answer = torch.empty(2, dtype=torch.float64)
            self._send_header(shard.rank, _PUSH, self._pulled[number], rate)
            sent: Any = dist.isend(part, group=self.process_group, group_dst=shard.rank, tag=_BODY)
            waits.append((sent, self._receive(answer, shard.rank, _ACK), answer))
        for sent, received, answer in waits:
            sent.wait()
            received.wait()
            answers.append((int(answer[0]), bool(answer[1])))
        return Pushed(max(stale for stale, _ in answers), any(refused for _, refused in answers))

    def close(self) -> None:
        """Ends the servers. Every rank must call it, after the last push and pull of all ranks."""
        for shard in self.shards:
            if shard is not self._own:
                self._send_header(shard.rank, _BYE)
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def leave(self) -> None:
        """After an error, tells the servers of other ranks to end, without waiting for lost ranks."""
        for shard in self.shards:
            if shard is not self._own:
                with suppress(RuntimeError, ValueError):  # that rank is gone
                    goodbye = torch.tensor([_BYE, 0, 0], dtype=torch.float64)
                    work = dist.isend(
                        goodbye, group=self.process_group, group_dst=shard.rank, tag=_HEADER
                    )
                    self._goodbyes.append((goodbye, work))
        if self._thread is not None:
            self._thread.join(_LEAVE_WAIT_S)

    def _check(self) -> None:
        if self._failure is not None:
            raise CommError(
                f"the parameter server of rank {self._group.rank} failed ({self._failure})",
                "see the ranks' logs",
            )

    def _send_header(self, rank: int, kind: int, version: int = 0, rate: float = 0.0) -> None:
        header = torch.tensor([kind, version, rate], dtype=torch.float64)
        dist.send(header, group=self.process_group, group_dst=rank, tag=_HEADER)

    def _receive(self, into: Tensor, rank: int, tag: int) -> Any:
        return dist.irecv(into, group=self.process_group, group_src=rank, tag=tag)

    def _take(self, gradient: Tensor, pulled: int, rate: float) -> tuple[int, bool]:
        """Applies a gradient to this rank's shard. Returns its staleness, and True if it was refused."""
        assert self._apply is not None
        with self._lock:
            stale = self._version - pulled
            applied = self._apply(gradient, rate)
            self._version += 1
        return stale, not applied

    def _serve(self) -> None:
        """Handles requests of other ranks until all of them have sent their last message."""
        assert self._own is not None
        assert self._weights is not None
        header = torch.empty(3, dtype=torch.float64)
        gradient = torch.empty(self._own.stop - self._own.start)
        left = self._group.world_size - 1
        try:
            while left:
                rank = dist.recv(header, group=self.process_group, tag=_HEADER)
                kind, version, rate = header.tolist()
                if kind == _BYE:
                    left -= 1
                elif kind == _PULL:
                    with self._lock:
                        reply = torch.cat([_encoded(self._version), self._weights])
                    dist.send(reply, dst=rank, group=self.process_group, tag=_REPLY)
                else:
                    dist.recv(gradient, src=rank, group=self.process_group, tag=_BODY)
                    stale, refused = self._take(gradient, int(version), rate)
                    answer = torch.tensor([stale, float(refused)], dtype=torch.float64)
                    dist.send(answer, dst=rank, group=self.process_group, tag=_ACK)
        except Exception as error:  # noqa: BLE001  (raised by the worker's next call)
            self._failure = error


def _encoded(version: int) -> Tensor:
    """Splits the version number of a shard's weights into two numbers that fp32 represents exactly."""
    return torch.tensor([version >> 20, version & 0xFFFFF], dtype=torch.float32)


def _version_of(encoded: Tensor) -> int:
    return (int(encoded[0]) << 20) + int(encoded[1])


class Clock:
    """Sums a vector over all ranks in each step, so that a rank knows which steps others have finished.

    A rank that waits for the sum of a step knows that all ranks have finished this step. All ranks
    create it together, because it creates a process group.
    """

    def __init__(self) -> None:
        self._process_group = dist.new_group(backend="gloo")

    def tick(self, row: Tensor) -> Callable[[], object]:
        """Begins to sum `row`, a vector in host memory, over the same step of all ranks.

        Returns:
            A function that waits until `row` contains the sum.
        """
        work = dist.all_reduce(row, group=self._process_group, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait


def histogram_row(staleness: int | None) -> Tensor:
    """Returns a vector with one count per staleness value: 1 at `staleness`, 0 elsewhere."""
    row = torch.zeros(MOST_STALENESS + 1)
    if staleness is not None:
        row[min(staleness, MOST_STALENESS)] = 1
    return row


def counts_of(row: Tensor) -> dict[str, int]:
    """Returns the number of pushes for each staleness value that occurred."""
    return {str(at): round(count) for at, count in enumerate(row.tolist()) if count}
