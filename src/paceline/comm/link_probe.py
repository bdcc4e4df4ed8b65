"""`LinkProbe`: latency and bandwidth between pairs of ranks, and contention when all ranks send.

The probe measures the cost of a message inside a node and between nodes. The result is the cost for the
slowest pair of those that were measured. Pairs are measured one after the other, so that no other
traffic disturbs them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from paceline.plan.plan_file import LinkFacts

# Message sizes in bytes. Large ones show the bandwidth of a link that passes short bursts faster.
SIZES = (4, 1024, 16 * 1024, 128 * 1024, 1024 * 1024, 2 * 1024 * 1024)
_PAIRS = 3
_REPEATS = 9
_REPEATS_OF_LARGE = 5
_LARGE_BYTES = 1024 * 1024
_CONTENTION_BYTES = 512 * 1024
# Message sizes and round trips of the brief probe.
_BRIEF_SIZES = (4, 128 * 1024)
_BRIEF_REPEATS = 2


class LinkProbe:
    """Measures the time to send a message, as half a round trip. All ranks call its methods.

    Args:
        group: A process group of all ranks.
        rank: This rank.
        nodes: The ranks of each node.
        device: The device of this rank.
    """

    def __init__(
        self, group: ProcessGroup, rank: int, nodes: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        self._group, self._rank, self._nodes = group, rank, nodes
        # Gloo sends only host memory, and NCCL only GPU memory.
        cuda = device.type == "cuda" and dist.get_backend(group) == "nccl"
        self._device = device if cuda else torch.device("cpu")
        self._message = torch.zeros(max(SIZES), dtype=torch.uint8, device=self._device)
        self._answer = torch.zeros_like(self._message)

    def inside(self) -> LinkFacts | None:
        """Returns the cost of a message inside a node; None if no node has two ranks."""
        pairs = [(node[0], node[1]) for node in self._nodes if len(node) > 1]
        rings = [list(node) for node in self._nodes if len(node) > 1]
        return self._facts(pairs[:_PAIRS], [_neighbours(ring) for ring in rings])

    def between(self) -> LinkFacts | None:
        """Returns the cost of a message between nodes; None if there is only one node."""
        heads = [node[0] for node in self._nodes]
        if len(heads) < 2:
            return None
        pairs = [(heads[0], head) for head in heads[1:]][:_PAIRS]
        width = min(len(node) for node in self._nodes)
        columns = [[node[at] for node in self._nodes] for at in range(width)]
        return self._facts(pairs, [_neighbours(column) for column in columns])

    def brief(self) -> tuple[LinkFacts | None, LinkFacts | None]:
        """Returns rough costs of a message inside a node and between nodes, from a few round trips."""
        inside = [(node[0], node[1]) for node in self._nodes if len(node) > 1]
        heads = [node[0] for node in self._nodes]
        between = [(heads[0], heads[1])] if len(heads) > 1 else []
        costs: list[LinkFacts | None] = []
        for pairs in (inside, between):
            points = [
                (size, self._round_trip_s(pair, size, _BRIEF_REPEATS, barrier=False) / 2)
                for pair in pairs[:1]
                for size in _BRIEF_SIZES
            ]
            costs.append(fit_cost(points) if points else None)
        return costs[0], costs[1]

    def _facts(
        self, pairs: Sequence[tuple[int, int]], rings: Sequence[dict[int, tuple[int, int]]]
    ) -> LinkFacts | None:
        if not pairs:
            return None
        costs = []
        for pair in pairs:
            points = [(size, self._round_trip_s(pair, size) / 2) for size in SIZES]
            costs.append(fit_cost(points))
        slowest = max(costs, key=lambda cost: cost.alpha_s + cost.beta_s_per_byte * max(SIZES))
        alone_s = self._shift_s([_only(rings[0], pairs[0])])
        all_s = self._shift_s(rings)
        return replace(slowest, contention=max(1.0, all_s / alone_s))

    def _round_trip_s(
        self, pair: tuple[int, int], size: int, repeats: int = 0, *, barrier: bool = True
    ) -> float:
        """Returns the median seconds of a round trip of `size` bytes, on every rank.

        The first rank of `pair` measures the time.
        """
        out, back = self._message[:size], self._answer[:size]
        first, second = pair

        def trip() -> None:
            if self._rank == first:
                dist.send(out, group=self._group, group_dst=second)
                dist.recv(back, group=self._group, group_src=second)
            elif self._rank == second:
                dist.recv(back, group=self._group, group_src=first)
                dist.send(out, group=self._group, group_dst=first)

        repeats = repeats or (_REPEATS if size < _LARGE_BYTES else _REPEATS_OF_LARGE)
        return self._median_s(trip, repeats, of=first, barrier=barrier)

    def _shift_s(self, rings: Sequence[dict[int, tuple[int, int]]]) -> float:
        """Returns the seconds in which every rank of every ring sends a message to its successor.

        All ranks send at the same time; the result is the time of the slowest rank.
        """
        places = [ring[self._rank] for ring in rings if self._rank in ring]
        out, back = self._message[:_CONTENTION_BYTES], self._answer[:_CONTENTION_BYTES]

        def shift() -> None:
            operations: list[dist.P2POp] = []
            for before, after in places:
                if after >= 0:
                    operations.append(
                        dist.P2POp(dist.isend, out, group=self._group, group_peer=after)
                    )
                if before >= 0:
                    operations.append(
                        dist.P2POp(dist.irecv, back, group=self._group, group_peer=before)
                    )
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

        return self._median_s(shift, _REPEATS, of=None)

    def _median_s(
        self, work: Callable[[], None], repeats: int, of: int | None, *, barrier: bool = True
    ) -> float:
        """Returns the median seconds that rank `of` needs for `work`, on every rank.

        If `of` is None, returns the largest median of all ranks. Without `barrier`, `work` itself must
        make the ranks wait for each other.
        """
        taken = []
        for _ in range(repeats + 1):
            if barrier:
                dist.barrier(group=self._group)
            start = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            taken.append(time.perf_counter() - start)
        own = statistics.median(taken[1:])  # the first repetition also opens the connection
        said = torch.tensor(
            [own if of in (None, self._rank) else 0.0], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        return float(said)


def _neighbours(ring: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Returns for each rank of a ring its predecessor and its successor."""
    return {
        rank: (ring[at - 1], ring[(at + 1) % len(ring)])
        for at, rank in enumerate(ring)
        if len(ring) > 1
    }


def _only(ring: dict[int, tuple[int, int]], pair: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Returns a ring in which only the first rank of the pair sends, to the second rank.

    A predecessor or successor of -1 means that there is none.
    """
    first, second = pair
    assert first in ring
    return {first: (-1, second), second: (first, -1)}


def fit_cost(points: Sequence[tuple[int, float]]) -> LinkFacts:
    """Fits the cost α + β·m of a message of m bytes to measured points.

    The fit minimizes the sum of the squares of (α + β·m − t) / t for measured times t. So small messages
    have the same weight as large ones. Neither α nor β is negative.

    Args:
        points: Pairs of bytes and seconds.

    Returns:
        α, β, and as `residual` the root mean square of the relative errors (0.1 means 10 %).
    """
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ValueError("a fit needs points with a time above 0")
    sizes, seconds = np.array(points, dtype=np.float64).T
    largest = max(float(sizes.max()), 1.0)
    # Sizes are relative to the largest size, so that both unknowns have a similar magnitude.
    shares = np.stack([1 / seconds, sizes / largest / seconds])
    fits = []
    for used in ([0, 1], [0], [1]):
        solution, _, rank, _ = np.linalg.lstsq(shares[used].T, np.ones(len(points)), rcond=1e-6)
        if rank == len(used) and solution.min() >= 0:
            errors = solution @ shares[used] - 1
            cost = dict(zip(used, solution.tolist(), strict=True))
            residual = math.sqrt(float(np.mean(errors * errors)))
            fits.append(LinkFacts(cost.get(0, 0.0), cost.get(1, 0.0) / largest, residual))
    return min(fits, key=lambda fit: fit.residual)
