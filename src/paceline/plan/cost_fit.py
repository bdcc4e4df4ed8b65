"""Costs as they were measured: what an all-reduce takes on clusters like those that were probed.

In: samples (nodes, ranks a node, link rate, algorithm, bytes, seconds). Out: for each algorithm six
prices: of a call, of a round, of a message, of the seconds that a node's link is busy, and of a byte that
processors move between nodes and inside them. All but the prices follow from the algorithm; so what was
measured on some sizes, ranks and links predicts others. Prices are never negative, and fitted to
relative errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.plan.collective_cost import COSTS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """`link_s` is the time a byte takes on a node's link; 0 with one node."""

    nodes: int
    ranks_per_node: int
    link_s: float

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Sample:
    place: Place
    algorithm: str
    size_bytes: float
    seconds: float


def work_of(algorithm: str, place: Place, sizes: npt.ArrayLike) -> Floats:
    """Calls, rounds, messages, link seconds, bytes between nodes and bytes inside, a column each."""
    if algorithm not in COSTS:
        raise ConfigError("algorithm", algorithm, "unknown", nearest(algorithm, tuple(COSTS)))
    m = np.asarray(sizes, dtype=np.float64)
    return np.stack([_work(algorithm, place, float(one)) for one in m.ravel()]).reshape(*m.shape, 6)


def _work(algorithm: str, place: Place, m: float) -> Floats:
    p, h, k = place.ranks, place.nodes, place.ranks_per_node
    log = math.ceil(math.log2(p)) if p > 1 else 0
    least = 2 * (h - 1) / h * m  # what crosses a node's link each way, at the least
    if algorithm == "hierarchical":
        rounds, messages = 2 * (k > 1) + 2 * (h - 1), 2 * (p - h) + 2 * h * (h - 1)
        link, between = least, h * least
    elif algorithm == "torus2d":
        rounds = 2 * (k - 1) + 2 * (h - 1)
        messages, link, between = p * rounds, least, h * least
    elif algorithm == "halving_doubling":
        # Neighbours exchange the large halves first, so no more than the least crosses a link.
        rounds, messages, link, between = 2 * log, 2 * p * log, least, h * least
    elif algorithm == "tree":
        crossings, busiest = _tree_crossings(h, k)
        rounds, messages, link, between = 2 * log, 2 * (p - 1), 2 * busiest * m, 2 * crossings * m
    elif algorithm == "central":
        rounds, messages, link, between = 2, 2 * p * h, k * least, p * least
    else:
        link = 2 * (p - 1) / p * m if h > 1 else 0.0
        rounds, messages, between = 2 * (p - 1), 2 * p * (p - 1), h * link
    # All ranks together receive 2(p − 1)·m, whichever way it takes.
    inside = max(0.0, 2 * (p - 1) * m - between)
    return np.array([1.0, rounds, messages, link * place.link_s, between, inside])


@cache
def _tree_crossings(nodes: int, ranks: int) -> tuple[int, int]:
    """Edges of the binomial tree between nodes, and those at the busiest node's link, one way."""
    arriving, leaving = [0] * nodes, [0] * nodes
    for rank in range(1, nodes * ranks):
        here, above = rank // ranks, (rank & (rank - 1)) // ranks
        if here != above:
            arriving[above] += 1
            leaving[here] += 1
    return sum(leaving), max(*arriving, *leaving)


@dataclass(frozen=True)
class FittedCosts:
    """`prices` by algorithm; `spread` is the relative root mean square of what the fit missed."""

    prices: dict[str, tuple[float, ...]]
    spread: float

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> FittedCosts:
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            if not (sample.seconds > 0 and math.isfinite(sample.seconds)):
                raise ConfigError("seconds", sample.seconds, "must be above 0", "measure it again")
            by_name.setdefault(sample.algorithm, []).append(sample)
        if not by_name:
            raise ConfigError(
                "samples", None, "none given", "measure with paceline bench allreduce"
            )
        prices, missed = {}, []
        for name, rows in by_name.items():
            design = np.stack([work_of(name, row.place, row.size_bytes) for row in rows])
            seconds = np.array([row.seconds for row in rows])
            found = _no_negative(design / seconds[:, None])
            prices[name] = tuple(float(price) for price in found)
            missed.append((design @ found) / seconds - 1)
        return cls(prices, float(np.sqrt(np.mean(np.concatenate(missed) ** 2))))

    def seconds(self, algorithm: str, place: Place, sizes: npt.ArrayLike) -> Floats:
        if algorithm not in self.prices:
            raise ConfigError(
                "algorithm", algorithm, "was not measured", nearest(algorithm, tuple(self.prices))
            )
        m = np.asarray(sizes, dtype=np.float64)
        found: Floats = work_of(algorithm, place, m) @ np.array(self.prices[algorithm])
        return np.where(m > 0, found, 0.0)


def _no_negative(design: Floats) -> Floats:
    """Least squares to ones without negative prices: of all sets of columns, few as they are, the best
    whose plain solution has none."""
    columns = design.shape[1]
    wanted = np.ones(len(design))
    best, least = np.zeros(columns), math.inf
    # Columns differ by ten orders of magnitude: one scale for all keeps the solution sound.
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            part = design[:, chosen] / scale[list(chosen)]
            solution, *_ = np.linalg.lstsq(part, wanted, rcond=None)
            if (solution < 0).any():
                continue
            error = float(((part @ solution - wanted) ** 2).sum())
            if error < least * (1 - 1e-9):
                least, best = error, np.zeros(columns)
                best[list(chosen)] = solution / scale[list(chosen)]
    return best
