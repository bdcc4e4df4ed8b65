"""What a buffer costs: its messages, each by the cheapest algorithm, in the cheapest format allowed.

In: gradients in order of readiness, a cluster, algorithms and wire formats. Out: seconds for any run of
neighbouring gradients, and the algorithms and the format behind them. A buffer with gradients of two
number formats travels as two messages; the step's signals ride in the last buffer's fp32 message, or
follow it as one more. Padding travels, too; it decides which message is the larger, and is not charged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster
from paceline.plan.collective_cost import COSTS, all_reduce_s
from paceline.plan.wire_format import (
    keeps_float32,
    padded,
    signal_bytes,
    travelling,
    wide_is_bulk,
    wire_names,
)
from paceline.plan.workload import Gradient

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


class BufferCost:
    """Tables over all pairs of gradients: `seconds[i, j]` is for gradients i to j − 1."""

    def __init__(
        self, gradients: Sequence[Gradient], cluster: Cluster, algorithms: Sequence[str],
        wires: Sequence[str] = ("auto",),
    ) -> None:  # fmt: skip
        if not algorithms:
            raise ConfigError("--algorithm", None, "none given", f"use {', '.join(COSTS)}")
        self.wires = wire_names(wires)
        if not self.wires:
            raise ConfigError("--wire", None, "none given", "use auto")
        counts = np.array([[g.elements * g.half, g.elements * (not g.half)] for g in gradients])
        held, in_buffers = _runs(counts), _runs(padded(counts))
        tables = [_WireCost(held, in_buffers, wire, cluster, algorithms) for wire in self.wires]
        self._by_wire = dict(zip(self.wires, tables, strict=True))
        self.seconds: Floats = np.minimum.reduce([table.seconds for table in tables])

    def bytes(self, first: int, stop: int) -> int:
        """What travels of the gradients in the most exact format."""
        return int(self._by_wire[self.wires[0]].bytes[first, stop])

    def of(self, wire: str, first: int, stop: int) -> float:
        """Seconds in this format."""
        return float(self._by_wire[wire].seconds[first, stop])

    def names(self, wire: str, first: int, stop: int) -> tuple[str, str]:
        """The algorithms of the bulk, the larger message, and of those beside it."""
        return self._by_wire[wire].names(first, stop)


def _runs(counts: Counts) -> Counts:
    """For gradients (16 bits, 32 bits), the sums of all runs: [kind, i, j] is for i to j − 1."""
    before = np.concatenate([np.zeros((1, 2), dtype=np.int64), counts.cumsum(axis=0)]).T
    return np.asarray(before[:, None, :] - before[:, :, None])


class _WireCost:
    """The tables of one format."""

    def __init__(
        self, held: Counts, in_buffers: Counts, wire: str, cluster: Cluster,
        algorithms: Sequence[str],
    ) -> None:  # fmt: skip
        self._cluster, self._algorithms = cluster, tuple(algorithms)
        half, full = held
        narrow, wide, cast = travelling(half, full, wire)
        self.bytes: Floats = narrow + wide
        # The last buffer's signals: within its fp32 message, or else beside.
        signals = signal_bytes(len(half) - 1)
        rides = (full[:, -1] > 0) & keeps_float32(wire)
        wide[:, -1] += np.where(rides, signals, 0)
        self._tail: Floats = np.where(rides, 0.0, float(signals))
        bulk_is_wide = wide_is_bulk(in_buffers, wire)
        self._large = np.where(bulk_is_wide, wide, narrow)
        self._small = np.where(bulk_is_wide, narrow, wide)
        beside = self._times(self._small)
        beside[:, :, -1] += self._times(self._tail)
        bulk = self._times(self._large)
        self.seconds: Floats = bulk.min(axis=0) + beside.min(axis=0) + cast * cluster.cast_s
        if cluster.ranks == 1:
            self.seconds[:] = 0.0

    def _times(self, sizes: npt.ArrayLike) -> Floats:
        """By every algorithm, in the first dimension."""
        return np.stack([all_reduce_s(name, self._cluster, sizes) for name in self._algorithms])

    def names(self, first: int, stop: int) -> tuple[str, str]:
        small = self._times(self._small[first, stop])
        if stop == len(self._tail) - 1:
            small = small + self._times(self._tail[first])
        bulk = self._algorithms[int(self._times(self._large[first, stop]).argmin())]
        beside = self._algorithms[int(small.argmin())] if small.any() else bulk
        return bulk, beside
