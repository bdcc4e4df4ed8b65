"""Reads measurements from a plan file: the links of a cluster, and the profile of a step."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.settings import errors_of_file
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import ProbedTable
from paceline.plan.plan_file import PlanFile, ProbedCluster
from paceline.plan.schedules import NATIVE
from paceline.planner.workload import Workload

# Seconds to cast an element to 16 bits and back. A CPU core takes 0.15 to 0.5 ns, a GPU moves 12 bytes at
# 1 TB/s or more. Neither is worth measuring: a link of 10 Gbit/s takes 2 to 3 ns for the same element.
_CAST_S = {"cpu": 0.4e-9, "cuda": 12e-12}


def profile_of(file: PlanFile) -> Workload | None:
    """Returns the profiled step of a plan file, or None if the file has no profile.

    Raises:
        ConfigError: If the profile is damaged.
    """
    if file.workload is None:
        return None
    with errors_of_file(file.setting, file.path, "", "make it anew"):
        return Workload.from_table({"workload": file.workload})


def required_profile(file: PlanFile) -> Workload:
    """Returns the profiled step of a plan file that must have one.

    Raises:
        ConfigError: If the file has no valid profile.
    """
    return file.given(
        profile_of(file), "--profile", "has no profiled step: no [workload]",
        "make it with paceline profile, or paceline tune with --model",
    )  # fmt: skip


def planned_cluster(file: PlanFile) -> Cluster:
    """Returns the cluster of a plan file, with the measured all-reduce times if the file has them.

    Raises:
        ConfigError: If the file has no measured links, or if nodes have different numbers of ranks.
    """
    probed = file.given(
        file.probed, "--cluster", "has no [cluster] with probed links",
        "make it with paceline tune",
    )  # fmt: skip
    cluster, points = _links(probed), _points(file)
    if not points:
        return cluster
    native = "ring" if probed.backend == "gloo" else NATIVE
    return replace(cluster, probed=ProbedTable.of(cluster, points, native))


def _points(file: PlanFile) -> dict[str, list[tuple[float, float]]]:
    """Returns the measured times of each all-reduce algorithm, as pairs of bytes and seconds."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in file.measured:
        for name, seconds in row.medians_s.items():
            points.setdefault(name, []).append((float(row.size_bytes), float(seconds)))
    # Algorithms that were not measured at all sizes are left out.
    most = max((len(rows) for rows in points.values()), default=0)
    return {name: rows for name, rows in points.items() if len(rows) == most >= 2}


def _links(probed: ProbedCluster) -> Cluster:
    """Returns the cluster with its measured links, without the measured all-reduce times."""
    counts, intra, inter = probed.ranks_per_node, probed.intra, probed.inter
    if len(set(counts)) > 1:
        raise ConfigError(
            "cluster.ranks_per_node", list(counts), "nodes have different numbers of ranks",
            "plan for nodes with equal numbers, or run with comm.algorithm = 'hybrid'",
        )  # fmt: skip
    within, between = intra or inter, inter or intra
    if not counts or within is None or between is None:
        raise ConfigError(
            "cluster.ranks", sum(counts), "has no measured links", "tune on at least two ranks"
        )
    # `contention` was measured with all ranks sending, as in a real exchange.
    busy = within.beta_s_per_byte * max(1.0, within.contention)
    return Cluster(
        len(counts), counts[0], Link(within.alpha_s, busy),
        Link(between.alpha_s, between.beta_s_per_byte),
        oversubscription=max(1.0, between.contention / counts[0]),
        cast_s=_CAST_S.get(probed.device, _CAST_S["cpu"]), hidden_cost=probed.hidden_cost or 0.0,
        spread=0.15, has_network=inter is not None,
    )  # fmt: skip
