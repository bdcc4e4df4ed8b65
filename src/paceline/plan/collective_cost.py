"""What an all-reduce costs: seconds for m bytes, by algorithm.

In: a cluster; then sizes in bytes, one or an array. Out: seconds. p ranks in h groups of k; α, β and γ
are start-up, time a byte and time to add a byte; 1 is inside a group, 2 between groups. The formulas are
those of the literature, without pipelining but where it says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.plan.cluster import Cluster, Link

Seconds = npt.NDArray[np.float64]
Cost = Callable[[Cluster, Seconds], Seconds]


def ring_s(p: int, m: Seconds, link: Link, gamma_s: float = 0.0) -> Seconds:
    """2(p−1) rounds of m/p bytes."""
    share = (p - 1) / p
    return 2 * (p - 1) * link.alpha_s + 2 * share * m * link.beta_s + share * m * gamma_s


def _ring(c: Cluster, m: Seconds) -> Seconds:
    return ring_s(c.ranks, m, c.slowest, c.gamma_s)


def _hierarchical(c: Cluster, m: Seconds) -> Seconds:
    """Reduce to the group's master (reduce-scatter and gather), ring among masters, broadcast (scatter
    and all-gather)."""
    k, h, one, two = c.ranks_per_node, c.nodes, c.intra, c.between
    inside, outside = (k - 1) / k, (h - 1) / h
    return (
        4 * (k - 1) * one.alpha_s + 4 * inside * m * one.beta_s
        + 2 * (h - 1) * two.alpha_s + 2 * outside * m * two.beta_s
        + (inside + outside) * m * c.gamma_s
    )  # fmt: skip


def _torus2d(c: Cluster, m: Seconds) -> Seconds:
    """Reduce-scatter in rows, all-reduce in columns, all-gather in rows; k columns share the links."""
    k, h, one, two = c.ranks_per_node, c.nodes, c.intra, c.between
    inside, outside = (k - 1) / k, (h - 1) / h
    shared = max(1.0, k / c.links)
    return (
        2 * (k - 1) * one.alpha_s + 2 * inside * m * one.beta_s
        + 2 * (h - 1) * two.alpha_s + 2 * outside * (m / k) * shared * two.beta_s
        + (inside + outside / k) * m * c.gamma_s
    )  # fmt: skip


def _halving_doubling(c: Cluster, m: Seconds) -> Seconds:
    """log₂ p rounds each way; ranks beyond a power of two hand over first and are told last."""
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


def central_s(p: int, m: Seconds, link: Link, servers: int, gamma_s: float = 0.0) -> Seconds:
    """A parameter server over `servers` ranks."""
    server = p * (link.alpha_s + m * link.beta_s / servers)
    worker = servers * link.alpha_s + m * link.beta_s
    return 2 * np.maximum(server, worker) + p * m * gamma_s / servers


def _central(c: Cluster, m: Seconds) -> Seconds:
    return central_s(c.ranks, m, c.slowest, c.nodes, c.gamma_s)


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


def all_reduce_s(algorithm: str, cluster: Cluster, sizes: npt.ArrayLike) -> Seconds:
    """Seconds for each size; 0 for nothing to send, and with one rank."""
    if algorithm not in COSTS:
        raise ConfigError("--algorithm", algorithm, "unknown", nearest(algorithm, tuple(COSTS)))
    m = np.asarray(sizes, dtype=np.float64)
    if cluster.ranks == 1:
        return np.zeros_like(m)
    probed = cluster.probed
    if probed is not None and algorithm in probed.algorithms:
        return np.where(m > 0, probed.cost_s(algorithm, cluster, m), 0.0)
    return np.where(m > 0, COSTS[algorithm](cluster, m) + cluster.launch_s, 0.0)
