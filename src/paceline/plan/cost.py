"""What an all-reduce costs: seconds for m bytes, by algorithm.

Three ways to know it. `play` plays the schedule (`paceline.plan.schedules`) on a `Cluster`: each rank has
one port out and one port in; a message takes both for α + β·bytes, and a port takes one message after
the other, in the order of the schedule. It plays what runs over NCCL: a whole buffer as one segment, and
inside nodes the backend's own collectives, which are priced. `COSTS` are closed forms, those of the
literature, for any number of ranks. Where all links are alike they give what `play` gives. On two levels
so do ring, hierarchical and torus2d; the others charge the slowest link for every hop, an upper bound.
`ProbedTable` is what `paceline tune` measured.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.core.untrusted import LONGEST_S, SHORTEST_S
from paceline.plan.cluster import Cluster, Link
from paceline.plan.schedules import algorithm, check_name
from paceline.plan.steps import (
    Collective,
    CollectiveKind,
    Groups,
    Receive,
    Segment,
    Send,
    Span,
    Step,
)

Seconds = npt.NDArray[np.float64]
Cost = Callable[[Cluster, Seconds], Seconds]
Size = TypeVar("Size", float, npt.NDArray[np.float64])
_WIDTH = 4
# An algorithm without a closed form is played at these sizes, on so many ranks at most.
PLAYED_RANKS = 64
_PLAYED_BYTES = tuple(float(4**power) for power in range(3, 17))


def all_reduce_s(
    name: str, cluster: Cluster, sizes: npt.ArrayLike, own_cost: Cost | None = None
) -> Seconds:
    """Seconds for each size; 0 for nothing to send, and with one rank. `own_cost` is that of a wire
    format's own all-reduce."""
    if own_cost is None and not is_priced(name, cluster):
        raise ConfigError(
            "--algorithm", name, f"has no closed form for more than {PLAYED_RANKS} ranks",
            "allow another one, too",
        )  # fmt: skip
    m = np.asarray(sizes, dtype=np.float64)
    if cluster.ranks == 1:
        return np.zeros_like(m)
    probed = cluster.probed
    if probed is not None and name in probed.algorithms:
        return np.where(m > 0, probed.cost_s(name, cluster, m), 0.0)
    closed_form = own_cost or COSTS.get(name)
    cost = _played(name, cluster, m) if closed_form is None else closed_form(cluster, m)
    return np.where(m > 0, cost + cluster.launch_s, 0.0)


def is_priced(name: str, cluster: Cluster) -> bool:
    """Whether there is a closed form, or few enough ranks to play the schedule."""
    check_name(name, "--algorithm")
    return name in COSTS or cluster.ranks <= PLAYED_RANKS


def _played(name: str, cluster: Cluster, m: Seconds) -> Seconds:
    """Between played sizes a byte costs the same, and above the largest."""
    seconds = _play_sizes(name, replace(cluster, probed=None))
    (a, b), (s, t) = _PLAYED_BYTES[-2:], seconds[-2:]
    beyond = np.maximum(m - b, 0.0) * (t - s) / (b - a)
    return np.asarray(np.interp(m, _PLAYED_BYTES, seconds) + beyond)


@lru_cache(maxsize=256)
def _play_sizes(name: str, cluster: Cluster) -> tuple[float, ...]:
    return tuple(play(name, cluster, size) for size in _PLAYED_BYTES)


# Closed forms: p ranks in h groups of k; 1 is inside a group, 2 between groups.


def ring_s(p: int, m: Seconds, link: Link, gamma_s: float = 0.0) -> Seconds:
    """2(p−1) rounds of m/p bytes."""
    return collective_s("all_reduce", p, m, link, gamma_s)


def _ring(c: Cluster, m: Seconds) -> Seconds:
    return ring_s(c.ranks, m, c.slowest, c.gamma_s)


def _hierarchical(c: Cluster, m: Seconds) -> Seconds:
    """Reduce to the group's master, ring among masters, broadcast."""
    return (
        collective_s("reduce", c.ranks_per_node, m, c.intra, c.gamma_s)
        + collective_s("all_reduce", c.nodes, m, c.between, c.gamma_s)
        + collective_s("broadcast", c.ranks_per_node, m, c.intra, c.gamma_s)
    )


def _torus2d(c: Cluster, m: Seconds) -> Seconds:
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows; k columns share the links."""
    k, two = c.ranks_per_node, c.between
    shared = Link(two.alpha_s, two.beta_s * max(1.0, k / c.links))
    return (
        collective_s("reduce_scatter", k, m, c.intra, c.gamma_s)
        + collective_s("all_reduce", c.nodes, m / k, shared, c.gamma_s)
        + collective_s("all_gather", k, m, c.intra, c.gamma_s)
    )


def _halving_doubling(c: Cluster, m: Seconds) -> Seconds:
    """log₂ p rounds each way; ranks beyond a power of two send all first and receive the result last."""
    p, link = c.ranks, c.slowest
    core = 1 << (p.bit_length() - 1)
    share = (core - 1) / core
    cost = 2 * math.log2(core) * link.alpha_s + 2 * share * m * link.beta_s + share * m * c.gamma_s
    if core != p:
        cost = cost + 2 * link.alpha_s + 2 * m * link.beta_s + m * c.gamma_s
    return cost


def _tree(c: Cluster, m: Seconds) -> Seconds:
    depth, link = math.ceil(math.log2(c.ranks)), c.slowest
    return 2 * depth * (link.alpha_s + m * link.beta_s) + depth * m * c.gamma_s


def _central(c: Cluster, m: Seconds) -> Seconds:
    """Every server, one of each node, exchanges its shard with all others."""
    link, shard = c.slowest, m / c.nodes
    return (c.ranks - 1) * (2 * (link.alpha_s + shard * link.beta_s) + shard * c.gamma_s)


def _native(c: Cluster, m: Seconds) -> Seconds:
    """The backend's own, as NCCL does it: rings over all links of a node at once, or a pipelined double
    tree among nodes with a chain inside, whichever is faster."""
    rail = Link(c.between.alpha_s, c.between.beta_s / c.links)
    if c.nodes == 1:
        return ring_s(c.ranks, m, c.intra, c.gamma_s)
    beta = max(c.intra.beta_s, rail.beta_s)
    hops = 2 * c.nodes * ((c.ranks_per_node - 1) * c.intra.alpha_s + rail.alpha_s)
    ring = hops + 2 * (c.ranks - 1) / c.ranks * m * beta + m * c.gamma_s
    depth = 2 * (math.ceil(math.log2(c.nodes)) * rail.alpha_s
                 + (c.ranks_per_node - 1) * c.intra.alpha_s)  # fmt: skip
    tree = depth + 2 * m * beta + m * c.gamma_s
    return np.minimum(ring, tree)


COSTS: dict[str, Cost] = {
    "native": _native,
    "ring": _ring,
    "hierarchical": _hierarchical,
    "torus2d": _torus2d,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "central": _central,
}


def collective_s(
    kind: CollectiveKind, ranks: int, size: Size, link: Link, gamma_s: float = 0.0
) -> Size:
    """The backend's own, around a ring: a reduce is a reduce-scatter and a gather, a broadcast a scatter
    and an all-gather."""
    share = (ranks - 1) / ranks
    ways = 1 if kind in ("reduce_scatter", "all_gather") else 2
    adds = 0 if kind in ("all_gather", "broadcast") else 1
    start_s = ways * (ranks - 1) * link.alpha_s
    return start_s + ways * share * size * link.beta_s + adds * share * size * gamma_s


def play(name: str, cluster: Cluster, size_bytes: float) -> float:
    """Seconds from the common start to the last rank's end."""
    counts = [cluster.ranks_per_node] * cluster.nodes
    return play_groups(name, Groups.of_nodes(counts, nested=True), cluster, size_bytes)


def play_groups(name: str, groups: Groups, cluster: Cluster, size_bytes: float) -> float:
    """The same for nodes that differ in their ranks; `cluster` has the links."""
    return _PortPlayer(name, groups, cluster, max(1, round(size_bytes / _WIDTH))).run()


class _PortPlayer:
    def __init__(self, name: str, groups: Groups, cluster: Cluster, length: int) -> None:
        self._cluster = cluster
        self._node = {rank: node for node, row in enumerate(groups.groups) for rank in row}
        ranks, segment = len(groups.order), Segment(length, _WIDTH)
        self._left: list[deque[Step]] = []
        for rank in range(ranks):
            rounds = algorithm(name).rounds(rank, groups, segment)
            self._left.append(deque(step for steps in rounds for step in steps))
        self._clock, self._out_free, self._in_free = ([0.0] * ranks for _ in range(3))
        self._started: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        self._met: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self._ready = deque(range(ranks))

    def run(self) -> float:
        while self._ready:
            self._proceed(self._ready.popleft())
        if any(self._left):
            stuck = [rank for rank, left in enumerate(self._left) if left]
            raise ValueError(f"schedule: ranks {stuck} wait for a message that is never sent")
        return max(self._clock)

    def _link(self, one: int, other: int) -> Link:
        same = self._node[one] == self._node[other]
        return self._cluster.intra if same else self._cluster.between

    def _seconds(self, rank: int, peer: int, span: Span) -> float:
        link = self._link(rank, peer)
        return link.alpha_s + link.beta_s * _bytes(span)

    def _proceed(self, rank: int) -> None:
        """As far as what has been sent to this rank allows."""
        left = self._left[rank]
        while left:
            step = left[0]
            if isinstance(step, Receive):
                if not self._receive(rank, step):
                    return
            elif isinstance(step, Collective):
                self._meet(rank, step)
                return
            else:
                if isinstance(step, Send):
                    self._send(rank, step)
                left.popleft()

    def _send(self, rank: int, step: Send) -> None:
        start = max(self._clock[rank], self._out_free[rank])
        self._out_free[rank] = start + self._seconds(rank, step.peer, step.span)
        self._started[rank, step.peer].append(start)
        self._ready.append(step.peer)

    def _receive(self, rank: int, step: Receive) -> bool:
        """Whether the first message has started; the others, if any, stay to be received."""
        first, *others = step.peers
        started = self._started[first, rank]
        if not started:
            return False
        begin = max(started.popleft(), self._in_free[rank])
        end = begin + self._seconds(first, rank, step.span)
        added_s = self._cluster.gamma_s * _bytes(step.span) if step.add else 0.0
        self._clock[rank] = self._in_free[rank] = max(self._clock[rank], end) + added_s
        left = self._left[rank]
        left.popleft()
        if others:
            left.appendleft(step._replace(peers=tuple(others)))
        return True

    def _meet(self, rank: int, step: Collective) -> None:
        """The last to come ends it for all."""
        met = self._met[step.members]
        met.append(rank)
        if len(met) < len(step.members):
            return
        cluster, link = self._cluster, self._link(step.members[0], step.members[-1])
        if link != cluster.intra:
            link = Link(link.alpha_s, link.beta_s * max(1.0, step.beside / cluster.links))
        seconds = collective_s(step.kind, len(met), float(_bytes(step.span)), link, cluster.gamma_s)
        end = max(self._clock[member] for member in met) + seconds
        del self._met[step.members]
        for member in met:
            self._clock[member] = end
            self._left[member].popleft()
        self._ready.extend(met)


def _bytes(span: Span) -> int:
    return (span[1] - span[0]) * _WIDTH


@dataclass(frozen=True)
class ProbedTable:
    """`points` are (bytes, seconds) in ascending order, measured on `base`. `native` is whose formula
    stands for the backend's own: ring for Gloo's."""

    base: Cluster
    points: Mapping[str, Sequence[tuple[float, float]]]
    native: str = "native"

    @classmethod
    def of(
        cls, base: Cluster, points: Mapping[str, Sequence[tuple[float, float]]], native: str
    ) -> ProbedTable:
        for name, rows in points.items():
            if len({size for size, _ in rows}) < max(2, len(rows)):
                raise ConfigError(
                    f"measured.{name}", list(rows), "needs two sizes or more, each once",
                    "run paceline tune again",
                )  # fmt: skip
            for size, seconds in rows:
                if not (1 <= size <= 2**62 and SHORTEST_S <= seconds <= LONGEST_S):
                    raise ConfigError(
                        f"measured.{name}", (size, seconds),
                        f"needs bytes above 0 and a time from {SHORTEST_S:g} to {LONGEST_S:g} s",
                        "run paceline tune again",
                    )  # fmt: skip
        return cls(base, {n: sorted(rows) for n, rows in points.items()}, native)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(self.points)

    def cost_s(self, algorithm: str, cluster: Cluster, sizes: Seconds) -> Seconds:
        known, seconds = (np.log(column) for column in zip(*self.points[algorithm], strict=True))
        wanted = np.log(np.maximum(sizes, 1.0))
        found = np.interp(wanted, known, seconds)
        # Below the smallest a message costs its start; above the largest every byte costs the same.
        beyond = np.maximum(wanted - known[-1], 0.0)
        measured = np.exp(found + beyond)
        there = replace(cluster, probed=None)
        if there == self.base:
            return np.asarray(measured)
        formula = self.native if algorithm == "native" else algorithm
        was, is_now = (all_reduce_s(formula, place, sizes) for place in (self.base, there))
        return np.asarray(measured * np.divide(is_now, was, out=np.ones_like(was), where=was > 0))
