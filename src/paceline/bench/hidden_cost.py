"""What an exchange costs the compute that hides it.

In: joined ranks whose processors both compute and send. Out: the seconds of compute that are lost for
each second that the exchange takes alone: 0 where hiding is free, 1 where nothing is gained. On a GPU it
is not measured: there the network does most of the work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.bench.rank_group import RankGroup

_BYTES = 512 * 1024
# A piece of work is short against an exchange, so that its end is noticed soon.
_EDGE = 160
_ROUNDS = 3
# All in all it takes some thirty exchanges.
_LONGEST_S = 1.0


def hidden_cost(ranks: RankGroup) -> float | None:
    """The mean of all ranks, on every rank; one thread computes on each."""
    if ranks.device.type != "cpu" or ranks.size < 2:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Probe(ranks).measure()
    finally:
        torch.set_num_threads(threads)


class _Probe:
    """Every method is called by all ranks alike."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._buffer = torch.zeros(_BYTES // 4)
        self._matrix = torch.randn(_EDGE, _EDGE) / math.sqrt(_EDGE)
        self._result = torch.empty_like(self._matrix)

    def measure(self) -> float | None:
        """None where an exchange takes too long for that."""
        ranks = self._ranks
        self._compute(200)  # warm
        if ranks.slowest([ranks.timed(lambda: self._send().wait())])[0] > _LONGEST_S:
            return None
        exchange_s = self._slowest(lambda: self._send().wait())
        piece_s = self._slowest(lambda: self._compute(200)) / 200
        pieces = math.ceil(2 * exchange_s / piece_s)
        alone_s = self._slowest(lambda: self._compute(pieces))
        count = math.ceil(2 * alone_s / exchange_s) + 1
        costs = []
        for _ in range(_ROUNDS):
            ranks.barrier()
            beside_s, done = self._both(pieces, count)
            costs.append(max(0.0, beside_s - alone_s) / (done * exchange_s))
        mean = torch.tensor([statistics.median(costs)], dtype=torch.float64)
        ranks.group.watched("the mean of a cost", lambda: dist.all_reduce(mean))
        return float(mean) / ranks.size

    def _slowest(self, work: Callable[[], object]) -> float:
        """The median of some samples, each of the slowest rank."""
        taken = [self._ranks.timed(work) for _ in range(_ROUNDS + 1)]
        return statistics.median(self._ranks.slowest(taken[1:]))

    def _compute(self, pieces: int) -> None:
        for _ in range(pieces):
            torch.mm(self._matrix, self._matrix, out=self._result)

    def _send(self) -> dist.Work:
        work: dist.Work | None = dist.all_reduce(
            self._buffer, group=self._ranks.groups.world, async_op=True
        )
        assert work is not None
        return work

    def _both(self, pieces: int, count: int) -> tuple[float, float]:
        """Seconds of the pieces beside exchanges one after the other, and how many of these ended; then
        all that are left of `count`, which must be the same on every rank."""
        begun, done, sent = time.perf_counter(), 0, 1
        under_way = self._send()
        for _ in range(pieces):
            self._compute(1)
            if under_way.is_completed() and sent < count:
                under_way.wait()
                under_way, done, sent = self._send(), done + 1, sent + 1
        taken = time.perf_counter() - begun
        under_way.wait()
        for _ in range(count - sent):
            self._send().wait()
        return taken, done + 0.5  # of the last one some part
