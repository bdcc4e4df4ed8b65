"""`TuningFile`: what `paceline tune` found out, as TOML.

In: the measured sizes, the choice, the cluster's facts. Out: a file that `SizeTable.read` reads, with the
numbers behind every row beside it: `[[sizes]]`, the table; `[[measured]]`, the medians of every size and
algorithm; `[cluster]`, ranks and nodes; `[cluster.intra]` and `[cluster.inter]`, the cost of a message
inside a node and between nodes. The planner reads the last two. Without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from paceline.comm.size_table import SizeTable
from paceline.comm.tuning_choice import NATIVE, MeasuredSize
from paceline.core.errors import ConfigError
from paceline.core.settings import convert, from_table
from paceline.core.untrusted import (
    LONGEST_S,
    SHORTEST_S,
    is_count,
    is_finite,
    parse_toml,
    short_repr,
)

_FIELD = "comm.sizes"


@dataclass(frozen=True)
class LinkFacts:
    """A link's cost by the slowest pair of ranks, and how many times longer a message takes when
    all ranks send at once."""

    alpha_s: float
    beta_s_per_byte: float
    residual: float
    contention: float


@dataclass(frozen=True)
class ClusterShape:
    """`intra` or `inter` is None where there is no such pair of ranks. `hidden_cost`: what a second of an
    exchange costs the compute that hides it, None where that was not measured."""

    ranks: int
    ranks_per_node: tuple[int, ...]
    backend: str
    device: str
    intra: LinkFacts | None = None
    inter: LinkFacts | None = None
    hidden_cost: float | None = None

    @property
    def nodes(self) -> int:
        return len(self.ranks_per_node)

    def to_table(self) -> dict[str, Any]:
        links = {"intra": self.intra, "inter": self.inter}
        return {
            "ranks": self.ranks, "nodes": self.nodes,
            "ranks_per_node": list(self.ranks_per_node),
            "backend": self.backend, "device": self.device,
            **({} if self.hidden_cost is None else {"hidden_cost": self.hidden_cost}),
            **{name: asdict(link) for name, link in links.items() if link is not None},
        }  # fmt: skip

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> ClusterShape:
        """The inverse of `to_table`."""
        intra, inter = (
            from_table(LinkFacts, f"cluster.{name}", table[name]) if name in table else None
            for name in ("intra", "inter")
        )
        return cls(
            int(table["ranks"]),
            tuple(int(count) for count in table["ranks_per_node"]),
            str(table["backend"]),
            str(table["device"]),
            intra,
            inter,
            convert(table.get("hidden_cost"), float | None, "cluster.hidden_cost"),
        )


@dataclass(frozen=True)
class TuningFile:
    """The table, the numbers behind it, and where they were measured."""

    table: SizeTable
    measured: tuple[MeasuredSize, ...]
    chosen: tuple[str, ...]
    cluster: ClusterShape

    def to_table(self) -> dict[str, Any]:
        return {
            "sizes": self._rows(),
            "cluster": self.cluster.to_table(),
            "measured": [
                {
                    "bytes": row.size_bytes,
                    "chosen": name,
                    "spread": float(f"{row.spread:.3g}"),
                    "median_s": dict(row.medians_s),
                }
                for row, name in zip(self.measured, self.chosen, strict=True)
            ],
        }

    def _rows(self) -> list[dict[str, Any]]:
        """Each row of the table with how much faster than the backend's own it was, at which sizes."""
        rows: list[dict[str, Any]] = self.table.to_table()["sizes"]
        for row in rows:
            row["measured"] = []
        for size, name in zip(self.measured, self.chosen, strict=True):
            row = next(r for r in rows if size.size_bytes <= r.get("up_to_bytes", size.size_bytes))
            against = size.medians_s[NATIVE] / size.medians_s[name]
            row["measured"].append(
                {"bytes": size.size_bytes, "times_native": float(f"{against:.3g}")}
            )
        return rows

    def write(self, path: Path) -> None:
        try:
            path.write_text(tomli_w.dumps(self.to_table()))
        except OSError as error:
            raise ConfigError(
                "--output", str(path), f"cannot be written ({error.strerror})", "choose another"
            ) from None

    @classmethod
    def read(cls, path: Path) -> TuningFile:
        table = SizeTable.read(path)
        content = parse_toml(path.read_bytes())
        try:
            measured: Sequence[Mapping[str, Any]] = content["measured"]
            for row in measured:
                _check_measured(row)
            return cls(
                table,
                tuple(
                    MeasuredSize(row["bytes"], row["median_s"], row.get("spread", 0.0))
                    for row in measured
                ),
                tuple(row["chosen"] for row in measured),
                ClusterShape.from_table(content["cluster"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                _FIELD, str(path), f"has no facts of a cluster ({error!r})", "run paceline tune"
            ) from None


def _check_measured(row: Mapping[str, Any]) -> None:
    medians = row["median_s"]
    sound = all(is_finite(s) and SHORTEST_S <= s <= LONGEST_S for s in medians.values())
    known = {NATIVE, row["chosen"]} <= medians.keys()
    sound = sound and is_finite(row.get("spread", 0.0))  # older files have none
    if not sound or not known or not is_count(row["bytes"], 1):
        raise ValueError(f"measured: {short_repr(row)}")
