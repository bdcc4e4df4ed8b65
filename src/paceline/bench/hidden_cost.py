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

from paceline.bench.ranks import RankGroup

_BYTES = 512 * 1024
# A piece of work is short against an exchange, so that its end is noticed soon.
_EDGE = 160
_PIECES = 200
_ROUNDS = 5
# Exchanges of a round, and about how long they take.
_LEAST, _MOST, _SENDING_S = 4, 40, 1.0
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
        self._compute(_PIECES)  # warm
        if ranks.slowest([ranks.timed(lambda: self._send().wait())])[0] > _LONGEST_S:
            return None
        exchange_s = self._slowest(lambda: self._send().wait())
        own = [ranks.timed(lambda: self._compute(_PIECES)) for _ in range(_ROUNDS)]
        piece_s = statistics.median(own) / _PIECES
        # Agreed on, because all know the slowest rank's time: collectives must come out even.
        count = min(max(round(_SENDING_S / exchange_s), _LEAST), _MOST)
        costs = []
        for _ in range(_ROUNDS):
            ranks.barrier()
            taken_s, pieces = self._both(count)
            costs.append((taken_s - pieces * piece_s) / (count * exchange_s))
        mean = torch.tensor([statistics.median(costs)], dtype=torch.float64)
        ranks.group.completed("the mean of a cost", lambda: dist.all_reduce(mean))
        return max(0.0, float(mean) / ranks.size)

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

    def _both(self, count: int) -> tuple[float, int]:
        """Seconds until `count` exchanges, one after the other, have ended, and the pieces of work done
        beside them."""
        begun, sent, pieces = time.perf_counter(), 1, 0
        under_way = self._send()
        while True:
            self._compute(1)
            pieces += 1
            if under_way.is_completed():
                under_way.wait()
                if sent == count:
                    return time.perf_counter() - begun, pieces
                under_way, sent = self._send(), sent + 1
