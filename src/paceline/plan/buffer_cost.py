"""What a buffer costs: its messages, each by the cheapest algorithm that is allowed.

In: gradients in order of readiness, a cluster, algorithms and a wire format. Out: seconds for any run of
neighbouring gradients, and the algorithms behind them. A buffer with gradients of two number formats
travels as two messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError, nearest
from paceline.plan.cluster import Cluster
from paceline.plan.collective_cost import COSTS, all_reduce_s
from paceline.plan.workload import Gradient

Floats = npt.NDArray[np.float64]
WIRES = ("auto", "float32", "float16", "bfloat16")


class BufferCost:
    """Tables over all pairs of gradients: `seconds[i, j]` is for gradients i to j − 1."""

    def __init__(
        self, gradients: Sequence[Gradient], cluster: Cluster, algorithms: Sequence[str],
        wire: str = "auto",
    ) -> None:  # fmt: skip
        if wire not in WIRES:
            raise ConfigError("--wire", wire, "unknown", nearest(wire, WIRES))
        if not algorithms:
            raise ConfigError("--algorithm", None, "none given", f"use {', '.join(COSTS)}")
        self.algorithms = tuple(algorithms)
        self.cluster = cluster
        half, full = _bytes(gradients, wire)
        # How many bytes of each kind come before each gradient.
        self._before = np.array([np.cumsum([0, *half]), np.cumsum([0, *full])], dtype=np.float64)
        sizes = self._before[:, None, :] - self._before[:, :, None]
        self._large, self._small = np.maximum(sizes[0], sizes[1]), np.minimum(sizes[0], sizes[1])
        self.seconds: Floats = self._best(self._large) + self._best(self._small)

    def _best(self, sizes: Floats) -> Floats:
        times = np.stack([all_reduce_s(name, self.cluster, sizes) for name in self.algorithms])
        best: Floats = times.min(axis=0)
        return best

    def bytes(self, first: int, stop: int) -> int:
        """What travels."""
        return int(self._large[first, stop] + self._small[first, stop])

    def names(self, first: int, stop: int) -> tuple[str, str]:
        """The algorithms of the larger message and of the one beside it."""
        return self._name(self._large[first, stop]), self._name(self._small[first, stop])

    def _name(self, size: float) -> str:
        times = [float(all_reduce_s(name, self.cluster, size)) for name in self.algorithms]
        return self.algorithms[times.index(min(times))]


def _bytes(gradients: Sequence[Gradient], wire: str) -> tuple[list[int], list[int]]:
    """Bytes of each gradient in the 16-bit message and in the other."""
    width = {"float32": 4, "float16": 2, "bfloat16": 2}.get(wire)
    half = [g.elements * (width or 2) if g.half else 0 for g in gradients]
    full = [0 if g.half else g.elements * (width or 4) for g in gradients]
    return half, full
