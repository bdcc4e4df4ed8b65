"""`ProbedTable`: the medians that `paceline tune` measured, as costs.

In: for each algorithm sizes and seconds on one cluster. Out: on that very cluster the measured curve,
straight between measured sizes on logarithmic axes; on a changed one (more nodes, faster links) the same
curve, times what the algorithm's formula says of the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.core.untrusted import LONGEST_S, SHORTEST_S
from paceline.plan.cluster import Cluster
from paceline.plan.collective_cost import all_reduce_s

Floats = npt.NDArray[np.float64]


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

    def cost_s(self, algorithm: str, cluster: Cluster, sizes: Floats) -> Floats:
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
