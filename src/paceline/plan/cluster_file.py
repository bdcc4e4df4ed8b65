"""A `Cluster` as it was probed: the `[cluster]` table of the file that `paceline tune` writes.

In: the TOML file. Out: the cluster, with start-up, rate and contention as measured; a ConfigError where
the file has no such table or where its figures cannot be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.untrusted import ParseError, is_count, is_finite, parse_toml, short_repr
from paceline.plan.cluster import RANKS_LIMIT, Cluster, Link
from paceline.plan.collective_cost import COSTS
from paceline.plan.probed_table import ProbedTable

# To bring an element into a 16-bit format and back. A core of this project's CPU machine takes 0.15 to
# 0.5 ns, by size and format; a GPU moves 12 bytes, at 1 TB/s or more. Neither is a thing to measure: a
# link of 10 Gbit/s takes 2 to 3 ns for the same element.
_CAST_S = {"cpu": 0.4e-9, "cuda": 12e-12}


def read_cluster(path: Path) -> Cluster:
    try:
        table = parse_toml(path.read_bytes())
    except (OSError, ParseError) as error:
        raise _error(path, f"cannot be read ({error})") from None
    if not isinstance(table.get("cluster"), dict):
        raise _error(path, "has no [cluster] table")
    found = _cluster(path, table["cluster"])
    points = _points(path, table.get("measured", []))
    if not points:
        return found
    native = "ring" if table["cluster"].get("backend") == "gloo" else "native"
    return replace(found, probed=ProbedTable.of(found, points, native))


def _points(path: Path, rows: Any) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {}
    if not isinstance(rows, list):
        raise _error(path, "has no measured sizes (no list of tables)")
    for number, row in enumerate(rows):
        medians = row.get("median_s") if isinstance(row, Mapping) else None
        if not isinstance(medians, Mapping) or not is_count(row.get("bytes"), 1):
            raise _error(path, f"has no measured sizes (measured[{number}]: bytes, median_s)")
        for name, seconds in medians.items():
            if name not in COSTS:
                raise ConfigError(
                    f"measured[{number}].median_s", name, "unknown algorithm", nearest(name, COSTS)
                )
            if not is_finite(seconds):
                raise ConfigError(
                    f"measured[{number}].median_s.{name}", seconds, "is not a finite number",
                    "run paceline tune again",
                )  # fmt: skip
            points.setdefault(name, []).append((float(row["bytes"]), float(seconds)))
    # An algorithm that was given up at larger sizes says nothing about them.
    most = max((len(rows) for rows in points.values()), default=0)
    return {name: rows for name, rows in points.items() if len(rows) == most >= 2}


def _cluster(path: Path, table: Mapping[str, Any]) -> Cluster:
    try:
        counts = table["ranks_per_node"]
        intra, inter = (_link(table[n]) if n in table else None for n in ("intra", "inter"))
        hidden = _number(table.get("hidden_cost", 0.0), "hidden_cost")
    except (KeyError, TypeError) as error:
        raise _error(path, f"not a cluster ({error})") from None
    if not isinstance(counts, list) or not all(is_count(n, 1, RANKS_LIMIT) for n in counts):
        raise ConfigError(
            "cluster.ranks_per_node", counts, f"must be a list of counts from 1 to {RANKS_LIMIT:,}",
            "run paceline tune again",
        )  # fmt: skip
    if len(set(counts)) > 1:
        raise ConfigError(
            "cluster.ranks_per_node", counts, "nodes differ in their ranks",
            "plan for the nodes that are alike, or run with comm.algorithm = 'hybrid'",
        )  # fmt: skip
    if not counts or (intra is None and inter is None):
        raise ConfigError(
            "cluster.ranks", sum(counts), "one rank has nothing to exchange",
            "tune on at least two ranks",
        )  # fmt: skip
    within, contention = inter if intra is None else intra  # type: ignore[misc]
    between, crowd = (within, contention) if inter is None else inter
    # Probed with all ranks sending, a link inside a node is as slow as it is in a real exchange.
    busy = Link(within.alpha_s, within.beta_s * max(1.0, contention))
    return Cluster(
        len(counts), counts[0], busy, between, oversubscription=max(1.0, crowd / counts[0]),
        cast_s=_CAST_S.get(str(table.get("device", "cpu")), _CAST_S["cpu"]), hidden_cost=hidden,
        spread=0.15,
    )  # fmt: skip


def _link(table: Mapping[str, Any]) -> tuple[Link, float]:
    return (
        Link(_number(table["alpha_s"], "alpha_s"), _number(table["beta_s_per_byte"], "beta_s")),
        _number(table.get("contention", 1.0), "contention"),
    )


def _number(value: object, name: str) -> float:
    if not is_finite(value):
        raise TypeError(f"{name} = {short_repr(value)} is not a finite number")
    return float(value)


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError("--cluster", str(path), problem, "make it with paceline tune")
