"""`SizeTable`: the all-reduce algorithm for each buffer size; `MeasuredSize`: measured times of a size.

A rule that changes the algorithm at a threshold η is a table of two rows.
`paceline.plan.size_choice` makes a table from measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.plan.schedules import check_name

_FIELD = "comm.hybrid.sizes"
_ROW_KEYS = {"algorithm", "up_to_bytes", "measured"}


@dataclass(frozen=True)
class SizeRow:
    """A row of a `SizeTable`: the algorithm for buffers of up to `up_to_bytes` bytes.

    `up_to_bytes` is None (no limit) in the last row.
    """

    algorithm: str
    up_to_bytes: int | None = None


@dataclass(frozen=True)
class SizeTable:
    """Chooses an all-reduce algorithm by the size of a buffer.

    Args:
        rows: The rows, in ascending order of `up_to_bytes`. The last row has no limit.

    Raises:
        ConfigError: If the rows are not sorted or name an unknown algorithm.

    Example:
        >>> table = pl.SizeTable.two_way(eta_bytes=1 << 20)
        >>> table.choose(4096)
        'hierarchical'
    """

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
                    "must be set in every row but the last",
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
        """Returns a table with one algorithm for all sizes."""
        return cls((SizeRow(algorithm),))

    @classmethod
    def two_way(cls, eta_bytes: int) -> SizeTable:
        """Returns a table of two rows: `hierarchical` below `eta_bytes`, otherwise `ring`."""
        if eta_bytes <= 0:
            return cls.single("ring")
        return cls((SizeRow("hierarchical", eta_bytes - 1), SizeRow("ring")))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms of the table without duplicates, in the order of the rows."""
        return tuple(dict.fromkeys(row.algorithm for row in self.rows))

    def choose(self, size_bytes: int) -> str:
        """Returns the algorithm for a buffer of this size."""
        for row in self.rows:
            if row.up_to_bytes is None or size_bytes <= row.up_to_bytes:
                return row.algorithm
        raise AssertionError("the last row has no limit")

    def to_table(self) -> dict[str, Any]:
        """Returns the table as plain lists, dicts and values, for TOML, JSON and checkpoints."""
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
        """Builds a table from the result of `to_table`. Raises ConfigError if `table` is invalid."""
        rows = table.get("sizes")
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise ConfigError(
                _FIELD, None, "is not a size table", "write [[sizes]] rows: up_to_bytes, algorithm"
            )
        made = []
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping) or not {"algorithm"} <= set(row) <= _ROW_KEYS:
                raise ConfigError(
                    f"{_FIELD}[{number}]", row, "is not a row of a size table",
                    "give algorithm and, except in the last row, up_to_bytes",
                )  # fmt: skip
            made.append(SizeRow(row["algorithm"], row.get("up_to_bytes")))
        return cls(tuple(made))

    @classmethod
    def read(cls, path: Path) -> SizeTable:
        """Reads the section `[[sizes]]` of a plan file, such as a file that `paceline tune` wrote."""
        from paceline.plan.plan_file import PlanFile

        return PlanFile.read(path, "comm.hybrid.sizes").table

    def write(self, path: Path) -> None:
        """Writes a plan file that contains only this table."""
        from paceline.plan.plan_file import PlanFile

        PlanFile(sizes=self).write(path)


@dataclass(frozen=True)
class MeasuredSize:
    """Measured all-reduce times for one buffer size: the median seconds of each algorithm.

    `spread` is the interquartile range of the times of the algorithm `native`, divided by their median.
    """

    size_bytes: int
    medians_s: Mapping[str, float]
    spread: float = 0.0
