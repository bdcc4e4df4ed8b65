"""The parts of a plan file that the planner reads: the measured cluster, and the profiled step.

`paceline.plan.plan_file` carries them as they are written.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ConfigError
from paceline.core.settings import errors_of_file
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import ProbedTable
from paceline.plan.plan_file import PlanFile, ProbedCluster
from paceline.plan.schedules import NATIVE
from paceline.planner.workload import Workload

# To bring an element into a 16-bit format and back. A core of this project's CPU machine takes 0.15 to
# 0.5 ns, by size and format; a GPU moves 12 bytes, at 1 TB/s or more. Neither is worth measuring: a
# link of 10 Gbit/s takes 2 to 3 ns for the same element.
_CAST_S = {"cpu": 0.4e-9, "cuda": 12e-12}


def profile_of(file: PlanFile) -> Workload | None:
    """The profiled step of a file; None if it has none. Raises ConfigError for a step that is damaged."""
    if file.workload is None:
        return None
    with errors_of_file(file.setting, file.path, "", "make it anew"):
        return Workload.from_table({"workload": file.workload})


def required_profile(file: PlanFile) -> Workload:
    """The profiled step of a file. Raises ConfigError if it has none."""
    return file.given(
        profile_of(file), "--profile", "has no profiled step: no [workload]",
        "make it with paceline profile, or paceline tune with --model",
    )  # fmt: skip


def planned_cluster(file: PlanFile) -> Cluster:
    """The cluster that a file measured. Its measured times count before formulas."""
    probed = file.given(
        file.probed, "--cluster", "has no [cluster] with probed links",
        "make it with paceline tune",
    )  # fmt: skip
    found, points = _links(probed), _points(file)
    if not points:
        return found
    native = "ring" if probed.backend == "gloo" else NATIVE
    return replace(found, probed=ProbedTable.of(found, points, native))


def _points(file: PlanFile) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {}
    for row in file.measured:
        for name, seconds in row.medians_s.items():
            points.setdefault(name, []).append((float(row.size_bytes), float(seconds)))
    # An algorithm that was left out at larger sizes says nothing about them.
    most = max((len(rows) for rows in points.values()), default=0)
    return {name: rows for name, rows in points.items() if len(rows) == most >= 2}


def _links(probed: ProbedCluster) -> Cluster:
    """The cluster without its measured times."""
    counts, intra, inter = probed.ranks_per_node, probed.intra, probed.inter
    if len(set(counts)) > 1:
        raise ConfigError(
            "cluster.ranks_per_node", list(counts), "nodes differ in their ranks",
            "plan for the nodes that are alike, or run with comm.algorithm = 'hybrid'",
        )  # fmt: skip
    within, between = intra or inter, inter or intra
    if not counts or within is None or between is None:
        raise ConfigError(
            "cluster.ranks", sum(counts), "has no probed links", "tune on at least two ranks"
        )
    # Probed with all ranks sending, a link inside a node is as slow as it is in a real exchange.
    busy = within.beta_s_per_byte * max(1.0, within.contention)
    return Cluster(
        len(counts), counts[0], Link(within.alpha_s, busy),
        Link(between.alpha_s, between.beta_s_per_byte),
        oversubscription=max(1.0, between.contention / counts[0]),
        cast_s=_CAST_S.get(probed.device, _CAST_S["cpu"]), hidden_cost=probed.hidden_cost or 0.0,
        spread=0.15, has_network=inter is not None,
    )  # fmt: skip
