"""A `Cluster` as it was probed: the `[cluster]` table of the file that `paceline tune` writes.

In: the TOML file. Out: the cluster, with start-up, rate and contention as measured; a ConfigError where
the file has no such table or where its figures cannot be.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.plan.cluster import Cluster, Link
from paceline.plan.probed_table import ProbedTable

# To bring an element into a 16-bit format and back. A core of this project's CPU machine takes 0.15 to
# 0.5 ns, by size and format; a GPU moves 12 bytes, at 1 TB/s or more. Neither is a thing to measure: a
# link of 10 Gbit/s takes 2 to 3 ns for the same element.
_CAST_S = {"cpu": 0.4e-9, "cuda": 12e-12}


def read_cluster(path: Path) -> Cluster:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _error(path, f"cannot be read ({error})") from error
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
    try:
        for row in rows:
            for name, seconds in row["median_s"].items():
                points.setdefault(name, []).append((float(row["bytes"]), float(seconds)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _error(path, f"has no measured sizes ({error})") from None
    # An algorithm that was given up at larger sizes says nothing about them.
    most = max((len(rows) for rows in points.values()), default=0)
    return {name: rows for name, rows in points.items() if len(rows) == most >= 2}


def _cluster(path: Path, table: Mapping[str, Any]) -> Cluster:
    try:
        counts = [int(count) for count in table["ranks_per_node"]]
        intra, inter = (_link(table[n]) if n in table else None for n in ("intra", "inter"))
        hidden = float(table.get("hidden_cost", 0.0))
    except (KeyError, TypeError, ValueError) as error:
        raise _error(path, f"not a cluster ({error})") from None
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
        Link(float(table["alpha_s"]), float(table["beta_s_per_byte"])),
        float(table.get("contention", 1.0)),
    )


def _error(path: Path, problem: str) -> ConfigError:
    return ConfigError("--cluster", str(path), problem, "make it with paceline tune")
