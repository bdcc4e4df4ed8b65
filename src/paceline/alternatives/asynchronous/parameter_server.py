"""`ParameterServer`: weights that live on server ranks; workers push gradients and pull weights, each at
its own pace.

Every rank is a worker; the first `servers` ranks, or all, also serve a shard of whole tensors, in a
thread. A push is applied when it arrives, and acknowledged; there is no barrier. Messages travel through
host memory over Gloo, which can receive from any rank. `Clock` bounds how far ranks drift apart: a rank
goes on with step n once all ranks have done step n − 1 − bound (stale synchronous parallel, Ho et al.
2013).
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

# Applies a gradient of the shard at a learning rate; False if the gradient was not finite, and left out.
Apply = Callable[[Tensor, float], bool]
_HEADER, _BODY, _REPLY, _ACK = range(1, 5)
_PULL, _PUSH, _BYE = range(3)
_END_WAIT_S, _LEAVE_WAIT_S = 5.0, 1.0
# Staleness above this is counted together.
MOST_STALENESS = 64


class Shard(NamedTuple):
    """Elements `start` to `stop` of the flat weights, which `rank` serves: tensors by their numbers."""

    rank: int
    start: int
    stop: int
    tensors: tuple[int, ...]


def cut_shards(sizes: Sequence[int], ranks: int, servers: int) -> list[Shard]:
    """Whole tensors, so that layer-wise optimizers work, dealt from the largest to the smallest to the
    server with the least so far. `servers` = 0 means all ranks."""
    count = min(servers or ranks, ranks)
    dealt: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = filled.index(min(filled))
        dealt[least].append(number)
        filled[least] += sizes[number]
    shards, start = [], 0
    for rank, numbers in enumerate(dealt):
        stop = start + sum(sizes[n] for n in numbers)
        shards.append(Shard(rank, start, stop, tuple(sorted(numbers))))
        start = stop
    return shards


class Pushed(NamedTuple):
    """`staleness`: updates by other ranks between the pull and this push, on the shard with the most.
    `refused`: the gradient was not finite on some shard, and was left out there."""

    staleness: int
    refused: bool


class ParameterServer:
    """The worker's side on every rank, and the thread that serves this rank's shard."""

    def __init__(self, group: Group, shards: Sequence[Shard]) -> None:
        """A collective: it makes a process group."""
        self._group, self.shards = group, shards
        self._world = dist.new_group(backend="gloo")
        self._own = next((shard for shard in shards if shard.rank == group.rank), None)
        self._lock = threading.Lock()
        self._version = 0
        self._weights: Tensor | None = None
        self._apply: Apply | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Messages whose memory must outlive this object's last call.
        self._goodbyes: list[Any] = []
        # Of the last pull, for each shard.
        self._pulled = [0] * len(shards)

    def serve(self, weights: Tensor, apply: Apply) -> None:
        """Starts serving `weights`, the shard's part of the flat weights, which `apply` changes in
        place."""
        if self._own is None:
            return
        self._weights, self._apply = weights, apply
        self._thread = threading.Thread(target=self._serve, name="paceline-server", daemon=True)
        self._thread.start()

    def pull(self, into: Tensor) -> None:
        """The current weights of all shards."""
        self._check()
        replies = []
        for number, shard in enumerate(self.shards):
            if shard is self._own:
                self._read_own(number, into[shard.start : shard.stop])
                continue
            reply = torch.empty(2 + shard.stop - shard.start)
            self._send_header(shard.rank, _PULL)
            work = dist.irecv(reply, group=self._world, group_src=shard.rank, tag=_REPLY)
            replies.append((number, shard, reply, work))
        for number, shard, reply, work in replies:
            assert work is not None
            work.wait()
            self._pulled[number] = _whole(reply[:2])
            into[shard.start : shard.stop].copy_(reply[2:])

    def push(self, gradient: Tensor, rate: float) -> Pushed:
        """Applies this rank's gradient to all shards, and returns once all have."""
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
            sent = dist.isend(part, group=self._world, group_dst=shard.rank, tag=_BODY)
            work = dist.irecv(answer, group=self._world, group_src=shard.rank, tag=_ACK)
            waits.append((sent, work, answer))
        for sent, work, answer in waits:
            assert sent is not None
            assert work is not None
            sent.wait()
            work.wait()
            answers.append((int(answer[0]), bool(answer[1])))
        return Pushed(max(stale for stale, _ in answers), any(refused for _, refused in answers))

    def close(self) -> None:
        """On all ranks, once nobody pushes or pulls any more."""
        for shard in self.shards:
            if shard is not self._own:
                self._send_header(shard.rank, _BYE)
        if self._thread is not None:
            self._thread.join(_END_WAIT_S)

    def leave(self) -> None:
        """After an error: lets the other ranks' servers end, without waiting for ranks that may be
        gone."""
        for shard in self.shards:
            if shard is not self._own:
                with suppress(RuntimeError, ValueError):  # that rank is gone
                    goodbye = torch.tensor([_BYE, 0, 0], dtype=torch.float64)
                    work = dist.isend(goodbye, group=self._world, group_dst=shard.rank, tag=_HEADER)
                    self._goodbyes.append((goodbye, work))
        if self._thread is not None:
            self._thread.join(_LEAVE_WAIT_S)

    @property
    def process_group(self) -> Any:
        return self._world

    def _check(self) -> None:
        if self._failure is not None:
            raise CommError(
                f"the parameter server of rank {self._group.rank} failed ({self._failure})",
                "look into the ranks' logs",
            )

    def _send_header(self, rank: int, kind: int, version: int = 0, rate: float = 0.0) -> None:
        header = torch.tensor([kind, version, rate], dtype=torch.float64)
        dist.send(header, group=self._world, group_dst=rank, tag=_HEADER)

    def _read_own(self, number: int, into: Tensor) -> None:
        assert self._weights is not None
        with self._lock:
            into.copy_(self._weights)
            self._pulled[number] = self._version

    def _take(self, gradient: Tensor, pulled: int, rate: float) -> tuple[int, bool]:
        assert self._apply is not None
        with self._lock:
            stale = self._version - pulled
            applied = self._apply(gradient, rate)
            self._version += 1
        return stale, not applied

    def _serve(self) -> None:
        """One request after the other, until all other ranks have said goodbye."""
        assert self._own is not None
        assert self._weights is not None
        header = torch.empty(3, dtype=torch.float64)
        gradient = torch.empty(self._own.stop - self._own.start)
        left = self._group.world_size - 1
        try:
            while left:
                rank = dist.recv(header, group=self._world, tag=_HEADER)
                kind, version, rate = header.tolist()
                if kind == _BYE:
                    left -= 1
                elif kind == _PULL:
                    with self._lock:
                        reply = torch.cat([_parts(self._version), self._weights])
                    dist.send(reply, dst=rank, group=self._world, tag=_REPLY)
                else:
                    dist.recv(gradient, src=rank, group=self._world, tag=_BODY)
                    stale, refused = self._take(gradient, int(version), rate)
                    answer = torch.tensor([stale, float(refused)], dtype=torch.float64)
                    dist.send(answer, dst=rank, group=self._world, tag=_ACK)
        except Exception as error:  # noqa: BLE001  (raised where the worker calls next)
            self._failure = error


def _parts(version: int) -> Tensor:
    """A version in two numbers that fp32 holds exactly."""
    return torch.tensor([version >> 20, version & 0xFFFFF], dtype=torch.float32)


def _whole(parts: Tensor) -> int:
    return (int(parts[0]) << 20) + int(parts[1])


class Clock:
    """Sums a row of numbers over ranks, step by step, without waiting: whoever waits for a step's sum
    knows that all ranks have done the step. That bounds how far they drift apart."""

    def __init__(self, group: Group) -> None:
        """A collective: it makes a process group."""
        self._group = group
        self._world = dist.new_group(backend="gloo")

    def tick(self, row: Tensor) -> Callable[[], None]:
        """Adds this rank's `row`, in host memory, to those of the same step of the other ranks; it holds
        the sum once the returned function has been called."""
        work = dist.all_reduce(row, group=self._world, async_op=True)
        assert work is not None

        def wait() -> None:
            work.wait()

        return wait


def histogram_row(staleness: int | None) -> Tensor:
    """One count in the place of a staleness; None counts nothing."""
    row = torch.zeros(MOST_STALENESS + 1)
    if staleness is not None:
        row[min(staleness, MOST_STALENESS)] = 1
    return row


def counts_of(row: Tensor) -> dict[str, int]:
    """How many pushes had each staleness, without those that none had."""
    return {str(at): round(count) for at, count in enumerate(row.tolist()) if count}
