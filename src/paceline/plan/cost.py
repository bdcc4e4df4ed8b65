"""Predicts the seconds of an all-reduce for each algorithm and number of bytes.

`COSTS` contains formulas from the literature, for any number of ranks. A registered algorithm
brings its own formula. The formulas describe the algorithms as they run over NCCL, where a buffer
is not split and ranks inside a node use the backend's own collectives. For nodes with several
ranks, the formulas of `ring`, `hierarchical` and `torus2d` are exact. The others assume the slowest
link for every message and give an upper bound. `ProbedTable` contains the times that `paceline
tune` measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link
from paceline.plan.schedules import REGISTRY, check_name
from paceline.plan.steps import CollectiveKind

Seconds = npt.NDArray[np.float64]
Cost = Callable[[Cluster, Seconds], Seconds]


def all_reduce_s(
    name: str, cluster: Cluster, sizes: npt.ArrayLike, own_cost: Cost | None = None
) -> Seconds:
    """Returns the seconds of an all-reduce for each size; 0 for zero bytes or a single rank.

    Args:
        name: The algorithm.
        cluster: The cluster on which the all-reduce runs.
        sizes: Sizes of buffers in bytes.
        own_cost: The cost function of a number format that has its own all-reduce, such as int8.

    Raises:
        ConfigError: If the algorithm has neither a formula nor measurements.
    """
    if own_cost is None and not is_priced(name, cluster):
        raise ConfigError(
            "--algorithm",
            name,
            "has no formula that predicts its time",
            "add an algorithm with a cost formula, or run paceline tune",
        )
    m = np.asarray(sizes, dtype=np.float64)
    if cluster.ranks == 1:
        return np.zeros_like(m)
    probed = cluster.probed
    if probed is not None and name in probed.algorithms:
        return np.where(m > 0, probed.cost_s(name, cluster, m), 0.0)
    cost = own_cost or closed_form(name)
    assert cost is not None
    cost_s = cost(cluster, m)
    return np.where(m > 0, cost_s + cluster.launch_s, 0.0)


def is_priced(name: str, cluster: Cluster) -> bool:
    """Returns True if the time of algorithm `name` can be predicted for this cluster."""
    check_name(name, "--algorithm")
    probed = cluster.probed
    if probed is not None and name in probed.algorithms and _unprobed(cluster) == probed.base:
        return True
    return closed_form(name) is not None


def _unprobed(cluster: Cluster) -> Cluster:
    return replace(cluster, probed=None)


def closed_form(name: str) -> Cost | None:
    """Returns the formula that predicts an algorithm's time, or None if there is none."""
    return COSTS.get(name) or (REGISTRY[name].cost if name in REGISTRY else None)


# Formulas: `c` is the cluster and `m` the sizes of buffers in bytes.


def _ring(c: Cluster, m: Seconds) -> Seconds:
    """Returns the seconds of a ring all-reduce: 2(p−1) steps of m/p bytes for p ranks and m bytes."""
    return collective_s("all_reduce", c.ranks, m, c.slowest, c.gamma_s)


def _hierarchical(c: Cluster, m: Seconds) -> Seconds:
    """Returns the seconds of a reduce in each node, a ring among nodes, and a broadcast in each node."""
    return (
        collective_s("reduce", c.ranks_per_node, m, c.intra, c.gamma_s)
        + collective_s("all_reduce", c.nodes, m, c.between, c.gamma_s)
        + collective_s("broadcast", c.ranks_per_node, m, c.intra, c.gamma_s)
    )


def _torus2d(c: Cluster, m: Seconds) -> Seconds:
    """Returns the seconds of a reduce-scatter in rows, an all-reduce in columns, an all-gather in rows.

    A row is a node. The all-reduces of the k columns run concurrently and share a node's links.
    """
    k, two = c.ranks_per_node, c.between
    shared = Link(two.alpha_s, two.beta_s * max(1.0, k / c.links))
    return (
        collective_s("reduce_scatter", k, m, c.intra, c.gamma_s)
        + collective_s("all_reduce", c.nodes, m / k, shared, c.gamma_s)
        + collective_s("all_gather", k, m, c.intra, c.gamma_s)
    )


def _halving_doubling(c: Cluster, m: Seconds) -> Seconds:
    """Returns the seconds of recursive halving and doubling, in 2 · log₂ p rounds for p ranks.

    If p is not a power of two, the surplus ranks send their whole buffer to a partner before these
    rounds and receive the result after them.
    """
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
    """Returns the seconds of a parameter server; one rank of each node serves a shard of the buffer.

    Each server receives its part of the buffer from all other ranks and returns the sum.
    """
    link, shard = c.slowest, m / c.nodes
    return (c.ranks - 1) * (2 * (link.alpha_s + shard * link.beta_s) + shard * c.gamma_s)


def _native(c: Cluster, m: Seconds) -> Seconds:
    """Returns the seconds of the backend's own all-reduce, as NCCL executes it.

    This is the minimum of two times: that of rings that use all links of a node, and that of a pipelined
    double tree among nodes with a chain of ranks in each node.
    """
    rail = Link(c.between.alpha_s, c.between.beta_s / c.links)
    if c.nodes == 1:
        return collective_s("all_reduce", c.ranks, m, c.intra, c.gamma_s)
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
    kind: CollectiveKind, ranks: int, size: Seconds, link: Link, gamma_s: float = 0.0
) -> Seconds:
    """Returns the seconds of a collective of the backend, if it uses a ring algorithm.

    A reduce consists of a reduce-scatter and a gather; a broadcast consists of a scatter and an
    all-gather.

    Args:
        kind: The collective.
        ranks: Number of ranks in the ring.
        size: Sizes of the buffers in bytes.
        link: The link between neighbours in the ring.
        gamma_s: Seconds to add one byte.
    """
    share = (ranks - 1) / ranks
    ways = 1 if kind in ("reduce_scatter", "all_gather") else 2
    adds = 0 if kind in ("all_gather", "broadcast") else 1
    start_s = ways * (ranks - 1) * link.alpha_s
    return start_s + ways * share * size * link.beta_s + adds * share * size * gamma_s


@dataclass(frozen=True)
class ProbedTable:
    """Measured seconds of all-reduces, by algorithm and number of bytes.

    Attributes:
        base: The cluster on which they were measured.
        points: For each algorithm, pairs of bytes and seconds in ascending order.
        native: The algorithm whose formula describes the backend's own all-reduce, `ring` for Gloo.
    """

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
                    f"measured.{name}", list(rows), "must contain two or more sizes, without duplicates",
                    "run paceline tune again",
                )  # fmt: skip
        return cls(base, {n: sorted(rows) for n, rows in points.items()}, native)

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(self.points)

    def cost_s(self, algorithm: str, cluster: Cluster, sizes: Seconds) -> Seconds:
        known, seconds = (np.log(column) for column in zip(*self.points[algorithm], strict=True))
        wanted = np.log(np.maximum(sizes, 1.0))
        logarithms = np.interp(wanted, known, seconds)
        # Below the smallest measured size the time is constant. Above the largest it is proportional
        # to the size.
        beyond = np.maximum(wanted - known[-1], 0.0)
        measured = np.exp(logarithms + beyond)
        there = _unprobed(cluster)
        if there == self.base:
            return np.asarray(measured)
        formula = self.native if algorithm == "native" else algorithm
        was, is_now = (all_reduce_s(formula, place, sizes) for place in (self.base, there))
        return np.asarray(measured * np.divide(is_now, was, out=np.ones_like(was), where=was > 0))
