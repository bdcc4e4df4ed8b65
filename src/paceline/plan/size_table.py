"""`SizeTable`: which algorithm carries a buffer of which size, and how it is chosen from measurements.

In: rows of (largest size in bytes, algorithm), or for each size the samples of each algorithm. Out: the
algorithm for a size. The paper's switch at a threshold η is the table of two rows.

Of measured times medians count. The backend's own all-reduce stays unless another is faster by a margin;
and what was chosen for the size before stays while it is as good as the best within the margin, so that
noise does not make the table flicker. The chosen is never slower than the best by more than the margin.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, RunError
from paceline.plan.schedules import NATIVE, check_name

_FIELD = "comm.hybrid.sizes"
_ROW_KEYS = {"algorithm", "up_to_bytes", "measured"}
MARGIN = 0.05
# The largest spread of repeated samples (`noise`) whose table is worth writing. Idle machines of the
# records, two cores with up to 16 ranks, have 0.07 to 0.31.
NOISE_LIMIT = 0.5
# And how much of the cores other processes may use: steady work beside it slows all samples alike.
FOREIGN_LIMIT = 0.25


@dataclass(frozen=True)
class SizeRow:
    """Buffers of up to `up_to_bytes` go by `algorithm`; None is the last row, without a limit."""

    algorithm: str
    up_to_bytes: int | None = None


@dataclass(frozen=True)
class SizeTable:
    """Rows in ascending order; the last has no limit."""

    rows: tuple[SizeRow, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ConfigError(_FIELD, None, "has no row", 'add one: algorithm = "native"')
        last = -1
        for number, row in enumerate(self.rows):
            check_name(row.algorithm, f"{_FIELD}[{number}].algorithm")
            name, limit = f"{_FIELD}[{number}].up_to_bytes", row.up_to_bytes
            if (limit is None) != (number == len(self.rows) - 1):
                raise ConfigError(
                    name,
                    limit,
                    "every row but the last has a limit",
                    "leave it out in the last row",
                )
            if limit is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, int) or limit <= last:
                raise ConfigError(
                    name, limit, f"must be a whole number above {last}", "sort the rows by size"
                )
            last = limit

    @classmethod
    def single(cls, algorithm: str) -> SizeTable:
        """One algorithm for all sizes."""
        return cls((SizeRow(algorithm),))

    @classmethod
    def two_way(cls, eta_bytes: int) -> SizeTable:
        """The paper's: hierarchical below η, ring from η on."""
        if eta_bytes <= 0:
            return cls.single("ring")
        return cls((SizeRow("hierarchical", eta_bytes - 1), SizeRow("ring")))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those in use, each once, in order of size."""
        return tuple(dict.fromkeys(row.algorithm for row in self.rows))

    def choose(self, size_bytes: int) -> str:
        """The algorithm for a buffer of this size."""
        for row in self.rows:
            if row.up_to_bytes is None or size_bytes <= row.up_to_bytes:
                return row.algorithm
        raise AssertionError("the last row has no limit")

    def to_table(self) -> dict[str, Any]:
        """Plain lists and numbers, for TOML, JSON and the checkpoint."""
        return {
            "sizes": [
                {"algorithm": row.algorithm}
                if row.up_to_bytes is None
                else {"up_to_bytes": row.up_to_bytes, "algorithm": row.algorithm}
                for row in self.rows
            ]
        }

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> SizeTable:
        """The inverse of `to_table`."""
        rows = table.get("sizes")
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise ConfigError(
                _FIELD, None, "not a size table", "write [[sizes]] rows: up_to_bytes, algorithm"
            )
        made = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or not {"algorithm"} <= set(row) <= _ROW_KEYS:
                raise ConfigError(
                    f"{_FIELD}[{number}]", row, "not a row", "it has algorithm and up_to_bytes"
                )
            made.append(SizeRow(row["algorithm"], row.get("up_to_bytes")))
        return cls(tuple(made))

    @classmethod
    def read(cls, path: Path) -> SizeTable:
        """The `[[sizes]]` of a file, also of one that `paceline tune` wrote."""
        from paceline.plan.plan_file import PlanFile

        return PlanFile.read(path, "comm.hybrid.sizes").table

    def write(self, path: Path) -> None:
        from paceline.plan.plan_file import PlanFile

        PlanFile(sizes=self).write(path)


@dataclass(frozen=True)
class MeasuredSize:
    """Median seconds of each algorithm for one size. `spread`: the quartiles of the backend's own
    samples lie so far apart, relative to their median."""

    size_bytes: int
    medians_s: Mapping[str, float]
    spread: float = 0.0

    @classmethod
    def of(cls, size_bytes: int, samples: Mapping[str, Sequence[float]]) -> MeasuredSize:
        medians = {name: statistics.median(taken) for name, taken in samples.items()}
        return cls(size_bytes, medians, _spread(samples.get(NATIVE, ())))

    def choose(self, before: str | None, margin: float) -> str:
        """`before`: what the next smaller size goes by."""
        best = min(self.medians_s, key=lambda name: (self.medians_s[name], name))
        bound = (1 + margin) * self.medians_s[best]
        for name in (NATIVE, before):
            if name is not None and self.medians_s.get(name, math.inf) <= bound:
                return name
        return best


def _spread(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def noise(measured: Sequence[MeasuredSize]) -> float:
    """The median spread over all sizes: one size that something disturbed does not count."""
    return statistics.median(row.spread for row in measured) if measured else 0.0


def check_noise(measured: Sequence[MeasuredSize], foreign: float, accept: bool) -> str:
    """RunError where samples of one size differ too much to choose by them, or where other processes use
    the `foreign` share of the cores; with `accept` a note instead."""
    found, problems = noise(measured), []
    if found > NOISE_LIMIT:
        problems.append(
            f"repeated all-reduces of one size spread by {found:.0%} (allowed: {NOISE_LIMIT:.0%})"
        )
    if foreign > FOREIGN_LIMIT:
        problems.append(
            f"other processes use {foreign:.0%} of the cores (allowed: {FOREIGN_LIMIT:.0%})"
        )
    if not problems:
        return ""
    cause = f"this host is too noisy to tune on: {' and '.join(problems)}"
    if accept:
        return f"{cause}; written because of --accept-noise"
    raise RunError(
        cause, "stop other work and repeat it, or give --accept-noise to write it anyway"
    )


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
