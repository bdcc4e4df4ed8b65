"""`LinkProbe`: latency and bandwidth between pairs of ranks, and contention when all ranks send.

Measures the cost of a message inside a node and between nodes, by the slowest pair that was tried. All
ranks call its methods. Pairs are tried one after the other, so that each has the network to itself.
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

# The large ones show the bandwidth also of a link that lets short bursts pass.
SIZES = (4, 1024, 16 * 1024, 128 * 1024, 1024 * 1024, 2 * 1024 * 1024)
_PAIRS = 3
_REPEATS = 9
_REPEATS_OF_LARGE = 5
_LARGE_BYTES = 1024 * 1024
_CONTENTION_BYTES = 512 * 1024


class LinkProbe:
    """Measures half the time of round trips of real messages.

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
        # Gloo carries memory of the host only; NCCL that of a GPU only.
        cuda = device.type == "cuda" and dist.get_backend(group) == "nccl"
        self._device = device if cuda else torch.device("cpu")
        self._message = torch.zeros(max(SIZES), dtype=torch.uint8, device=self._device)
        self._answer = torch.zeros_like(self._message)

    def inside(self) -> LinkFacts | None:
        """Returns the link between neighbours on one node; None if no node has two ranks."""
        pairs = [(node[0], node[1]) for node in self._nodes if len(node) > 1]
        rings = [list(node) for node in self._nodes if len(node) > 1]
        return self._facts(pairs[:_PAIRS], [_neighbours(ring) for ring in rings])

    def between(self) -> LinkFacts | None:
        """Returns the link between nodes; None if there is only one node."""
        heads = [node[0] for node in self._nodes]
        if len(heads) < 2:
            return None
        pairs = [(heads[0], head) for head in heads[1:]][:_PAIRS]
        width = min(len(node) for node in self._nodes)
        columns = [[node[at] for node in self._nodes] for at in range(width)]
        return self._facts(pairs, [_neighbours(column) for column in columns])

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

    def _round_trip_s(self, pair: tuple[int, int], size: int) -> float:
        """Returns on every rank the median time that the pair's first rank measured."""
        out, back = self._message[:size], self._answer[:size]
        first, second = pair

        def trip() -> None:
            if self._rank == first:
                dist.send(out, group=self._group, group_dst=second)
                dist.recv(back, group=self._group, group_src=second)
            elif self._rank == second:
                dist.recv(back, group=self._group, group_src=first)
                dist.send(out, group=self._group, group_dst=first)

        repeats = _REPEATS if size < _LARGE_BYTES else _REPEATS_OF_LARGE
        return self._median_s(trip, repeats, of=first)

    def _shift_s(self, rings: Sequence[dict[int, tuple[int, int]]]) -> float:
        """Returns the slowest rank's time if all ring members send to their successors at once."""
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

    def _median_s(self, work: Callable[[], None], repeats: int, of: int | None) -> float:
        """Returns the median time of rank `of` on every rank; None means the slowest rank."""
        taken = []
        for _ in range(repeats + 1):
            dist.barrier(group=self._group)
            start = time.perf_counter()
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            taken.append(time.perf_counter() - start)
        own = statistics.median(taken[1:])  # the first connects
        said = torch.tensor(
            [own if of in (None, self._rank) else 0.0], dtype=torch.float64, device=self._device
        )
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self._group)
        return float(said)


def _neighbours(ring: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Returns the predecessor and the successor of each member."""
    return {
        rank: (ring[at - 1], ring[(at + 1) % len(ring)])
        for at, rank in enumerate(ring)
        if len(ring) > 1
    }


def _only(ring: dict[int, tuple[int, int]], pair: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """Returns a ring with one message, from the pair's first to its second rank (-1: no rank)."""
    first, second = pair
    assert first in ring
    return {first: (-1, second), second: (first, -1)}


def fit_cost(points: Sequence[tuple[int, float]]) -> LinkFacts:
    """Fits the cost α + β·m of a message of m bytes to measured points.

    Minimizes the squares of (α + β·m − t) / t, so that small messages weigh as much as large ones.
    Neither α nor β is negative.

    Args:
        points: Pairs of bytes and seconds.

    Returns:
        α, β, and as `residual` the root mean square of the relative errors: 0.1 is 10 %.
    """
    if not points or any(seconds <= 0 for _, seconds in points):
        raise ValueError("a fit needs points with a time above 0")
    sizes, seconds = np.array(points, dtype=np.float64).T
    largest = max(float(sizes.max()), 1.0)
    # β counts in messages of the largest size, so that both numbers are of one magnitude.
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
