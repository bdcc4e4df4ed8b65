"""Costs as they were measured: what an all-reduce takes on clusters like those that were probed.

In: samples (nodes, ranks a node, link rate, algorithm, bytes, seconds). Out: for each algorithm four
prices: of a call, of a round of messages, of the seconds that a node's link is busy, of a byte that some
rank's processor moves or adds. Rounds, link seconds and bytes follow from the algorithm; so what was
measured on some sizes, ranks and links predicts others. Prices are never negative, and fitted to
relative errors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

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
    """Calls, rounds, link seconds and bytes moved, one column each."""
    m = np.asarray(sizes, dtype=np.float64)
    p, h, k = place.ranks, place.nodes, place.ranks_per_node
    outside = 2 * (h - 1) / h * m  # what crosses a node's link, each way, at the least
    whole = 2.0 * (p - 1) * m  # the bytes that any all-reduce makes ranks receive, all together
    if algorithm == "hierarchical":
        rounds, link, moved = 2 * math.ceil(math.log2(max(k, 1)) + 1) + 2 * (h - 1), outside, whole
    elif algorithm == "torus2d":
        rounds, link, moved = 2 * (k - 1) + 2 * (h - 1), outside, whole
    elif algorithm == "halving_doubling":
        rounds, link, moved = 2 * math.ceil(math.log2(p)), outside * k, whole
    elif algorithm == "tree":
        rounds, moved = 2 * math.ceil(math.log2(p)), whole
        link = 2 * m * math.ceil(math.log2(h)) if h > 1 else 0 * m
    elif algorithm == "central":
        rounds, link, moved = 2, outside * k, whole
    elif algorithm in COSTS:
        rounds, link, moved = 2 * (p - 1), 2 * (p - 1) / p * m * (h > 1), whole
    else:
        raise ConfigError("algorithm", algorithm, "unknown", nearest(algorithm, tuple(COSTS)))
    return np.stack(
        [np.ones_like(m), np.full_like(m, rounds), link * place.link_s, moved + 0 * m], axis=-1
    )


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
