"""From measured times to a table of sizes.

In: for each size the samples of each algorithm. Out: a `SizeTable`, and the choice for each measured
size. Medians count. The backend's own all-reduce stays unless another is faster by a margin; and what
was chosen for the size before stays while it is as good as the best within the margin, so that noise
does not make the table flicker. The chosen is never slower than the best by more than the margin.
Pure Python.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.comm.size_table import SizeRow, SizeTable

NATIVE = "native"
MARGIN = 0.05


@dataclass(frozen=True)
class MeasuredSize:
    """Median seconds of each algorithm for one size."""

    size_bytes: int
    medians_s: Mapping[str, float]

    @classmethod
    def of(cls, size_bytes: int, samples: Mapping[str, Sequence[float]]) -> MeasuredSize:
        return cls(size_bytes, {name: statistics.median(taken) for name, taken in samples.items()})

    def choose(self, before: str | None, margin: float) -> str:
        """`before`: what the next smaller size goes by."""
        best = min(self.medians_s, key=lambda name: (self.medians_s[name], name))
        bound = (1 + margin) * self.medians_s[best]
        for name in (NATIVE, before):
            if name is not None and self.medians_s.get(name, math.inf) <= bound:
                return name
        return best


def choose_algorithms(measured: Sequence[MeasuredSize], margin: float = MARGIN) -> list[str]:
    """One for each size, in ascending order of sizes."""
    chosen: list[str] = []
    for row in measured:
        chosen.append(row.choose(chosen[-1] if chosen else None, margin))
    return chosen


def table_of(measured: Sequence[MeasuredSize], chosen: Sequence[str]) -> SizeTable:
    """Rows change over halfway, in factors, between two measured sizes."""
    rows: list[SizeRow] = []
    for at in range(len(measured) - 1):
        if chosen[at] != chosen[at + 1]:
            limit = math.isqrt(measured[at].size_bytes * measured[at + 1].size_bytes)
            rows.append(SizeRow(chosen[at], limit))
    return SizeTable((*rows, SizeRow(chosen[-1])))
