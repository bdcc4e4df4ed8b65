"""`StartUp`: what a run needs before its first step: rendezvous, agreement, process groups.

In: a cluster, the algorithms of a plan and the backend. Out: how many process groups there are, of how
many ranks, and seconds. The store's times were measured (`records/2026-11-16_control-plane_2-core-cpu`);
NCCL's are an assumption, from published figures, because no run of this project has had more than four
ranks over NCCL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.core.untrusted import is_count, is_finite
from paceline.plan.schedules import NATIVE, algorithm
from paceline.plan.steps import Collective, Groups, Segment

# Phases of agreement of a training run, at the most; a test counts them.
PHASES = 11
# CPU time of the store's one thread, for each rank.
MEET_S = 0.3e-3
PHASE_S = 50e-6
# To set an NCCL communicator of p ranks up takes `_NCCL_S + p · _NCCL_RANK_S`. By what users of V100 and
# InfiniBand measured: 8 communicators of 8 ranks in 16.3 s, 32 of 32 ranks in 130 s (NVIDIA/nccl issue
# 534, 2021). For thousands of ranks it gives minutes, as reported there too (issue 1156, 2024).
_NCCL_S = 1.35
_NCCL_RANK_S = 0.086
_NCCL_SOURCE = "assumed from published figures for 8 and 32 ranks, not measured"
# Long enough that no algorithm leaves a part of it out.
_LONG = 1 << 20


@dataclass(frozen=True)
class GroupCount:
    """`count` process groups of `ranks` each."""

    name: str
    count: int
    ranks: int


def parts_used(algorithms: Collection[str], groups: Groups) -> frozenset[str]:
    """Which sub-groups the schedules of a plan have collectives in: `rows`, `masters`, `columns`."""
    found: set[str] = set()
    for name in set(algorithms) - {NATIVE}:
        for rank in groups.groups[0]:
            for steps in algorithm(name).rounds(rank, groups, Segment(_LONG)):
                found |= {_part(s, rank, groups) for s in steps if isinstance(s, Collective)}
    return frozenset(found)


def _part(step: Collective, rank: int, groups: Groups) -> str:
    if step.members == groups.row_of(rank):
        return "rows"
    return "masters" if step.members == groups.masters else "columns"


@dataclass(frozen=True)
class StartUp:
    """`backend_s`: until the slowest rank has set its communicators up; 0 for Gloo, which was not
    modelled."""

    ranks: int
    phases: int
    meet_s: float
    agree_s: float
    groups: tuple[GroupCount, ...]
    backend_s: float

    @classmethod
    def of(
        cls, nodes: int, ranks_per_node: int, algorithms: Collection[str], *, buckets: int = 2,
        nccl: bool = True,
    ) -> StartUp:  # fmt: skip
        ranks = nodes * ranks_per_node
        # One for the run itself, and one for the exchange unless it is a single native all-reduce.
        shared = set(algorithms) <= {NATIVE} and buckets == 1
        everyone = 1 if shared or ranks == 1 else 2
        counts = [GroupCount("all ranks", everyone, ranks)]
        if nccl and ranks > 1:
            # Two nodes have the parts that many have, and are counted in no time.
            small = Groups.of_nodes([ranks_per_node] * min(nodes, 2), nested=True)
            used = parts_used(algorithms, small)
            if "rows" in used:
                counts.append(GroupCount("rows", nodes, ranks_per_node))
            if "masters" in used:
                counts.append(GroupCount("masters", 1, nodes))
            if "columns" in used:
                # The first column is that of the masters.
                counts.append(GroupCount("columns", ranks_per_node - ("masters" in used), nodes))
        backend_s = 0.0
        if nccl and ranks > 1:
            # A rank is in each group of all ranks, in one row, and in one column or the masters.
            across = {c.name for c in counts} & {"masters", "columns"}
            sizes = [*[ranks] * everyone, *(c.ranks for c in counts if c.name == "rows")]
            sizes += [nodes] if across else []
            backend_s = sum(_NCCL_S + _NCCL_RANK_S * size for size in sizes)
        return cls(
            ranks, PHASES, MEET_S * ranks, PHASES * PHASE_S * ranks, tuple(counts), backend_s
        )

    @property
    def total_s(self) -> float:
        return self.meet_s + self.agree_s + self.backend_s

    def describe(self) -> str:
        groups = ", ".join(f"{g.count:,} × {g.ranks:,} ranks ({g.name})" for g in self.groups)
        nccl = f", NCCL {self.backend_s:,.0f} s ({_NCCL_SOURCE})" if self.backend_s else ""
        return (
            f"rendezvous {self.meet_s:.2g} s, {self.phases} phases {self.agree_s:.2g} s{nccl}; process "
            f"groups: {groups}"
        )

    def to_table(self) -> dict[str, Any]:
        return {**asdict(self), "groups": [asdict(group) for group in self.groups]}

    @classmethod
    def from_table(cls, table: object) -> StartUp | None:
        """None for another table: nothing that a run depends on."""
        if not isinstance(table, Mapping) or table.keys() != cls.__dataclass_fields__.keys():
            return None
        seconds = [table[name] for name in ("meet_s", "agree_s", "backend_s")]
        rows = table["groups"]
        if not all(is_finite(value) and value >= 0 for value in seconds):
            return None
        if not is_count(table["ranks"], 1) or not is_count(table["phases"], 0):
            return None
        fields = GroupCount.__dataclass_fields__.keys()
        if not isinstance(rows, list) or not all(
            isinstance(row, Mapping)
            and row.keys() == fields
            and isinstance(row["name"], str)
            and is_count(row["count"], 0)
            and is_count(row["ranks"], 1)
            for row in rows
        ):
            return None
        meet_s, agree_s, backend_s = map(float, seconds)
        groups = tuple(GroupCount(**row) for row in rows)
        return cls(table["ranks"], table["phases"], meet_s, agree_s, groups, backend_s)
