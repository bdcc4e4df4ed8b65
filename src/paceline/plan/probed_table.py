"""`ProbedTable`: the medians that `paceline tune` measured, as costs.

In: for each algorithm sizes and seconds on one cluster. Out: on that very cluster the measured curve,
straight between measured sizes on logarithmic axes; on others of its kind (more nodes, other groups)
what a fit of the algorithms' rounds, link seconds and bytes makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster
from paceline.plan.cost_fit import FittedCosts, Place, Sample

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProbedTable:
    """`points` are (bytes, seconds) in ascending order."""

    place: Place
    points: Mapping[str, Sequence[tuple[float, float]]]
    fitted: FittedCosts

    @classmethod
    def of(cls, place: Place, points: Mapping[str, Sequence[tuple[float, float]]]) -> ProbedTable:
        for name, rows in points.items():
            if len(rows) < 2 or any(size <= 0 or seconds <= 0 for size, seconds in rows):
                raise ConfigError(
                    f"measured.{name}", list(rows), "needs two sizes or more, and times above 0",
                    "run paceline tune again",
                )  # fmt: skip
        samples = (Sample(place, n, size, s) for n, rows in points.items() for size, s in rows)
        return cls(place, {n: sorted(rows) for n, rows in points.items()}, FittedCosts.of(samples))

    @property
    def algorithms(self) -> tuple[str, ...]:
        return tuple(self.points)

    def cost_s(self, algorithm: str, cluster: Cluster, sizes: Floats) -> Floats:
        place = Place(cluster.nodes, cluster.ranks_per_node, cluster.between.beta_s)
        if place != self.place:
            return self.fitted.seconds(algorithm, place, sizes)
        known, seconds = (np.log(column) for column in zip(*self.points[algorithm], strict=True))
        wanted = np.log(np.maximum(sizes, 1.0))
        found = np.interp(wanted, known, seconds)
        # Below the smallest a message costs its start; above the largest every byte costs the same.
        beyond = np.maximum(wanted - known[-1], 0.0)
        return np.asarray(np.exp(found + beyond))
