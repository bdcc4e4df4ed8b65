"""What a run needs before its first step: processes, rendezvous, agreement, process groups.

In: nodes, ranks of a node, the algorithms of a plan. Out: seconds by part, and the process groups. The
store's times were measured (`records/control-plane`). The start of the processes and NCCL's are
assumptions: no run of this project has had more than four ranks over NCCL. `paceline plan` and
`paceline rehearse` share them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from paceline.plan.schedules import NATIVE, parts_used
from paceline.plan.steps import Groups

# Interpreter, torch, model and first kernels of a rank: an assumption.
PROCESS_S = 20.0
# Phases of agreement of a training run, at the most; a test counts them.
PHASES = 11
# CPU time of the store's one thread, for each rank; measured with up to 1,024 ranks.
MEET_S = 0.3e-3
PHASE_S = 50e-6
MEASURED_RANKS = 1024
# To set an NCCL communicator of p ranks up takes `_NCCL_S + p · _NCCL_RANK_S`. By what users of V100 and
# InfiniBand measured: 8 communicators of 8 ranks in 16.3 s, 32 of 32 ranks in 130 s (NVIDIA/nccl issue
# 534, 2021). All communicators of a rank together take at most what was reported for the whole
# initialization of thousands of GPUs: 2.5 minutes (issue 1156, 2024). Nothing is known to us that is
# longer.
_NCCL_S = 1.35
_NCCL_RANK_S = 0.086
_NCCL_MEASURED_RANKS = 32
MOST_NCCL_S = 150.0


@dataclass(frozen=True)
class GroupCount:
    """`count` process groups of `ranks` each."""

    name: str
    count: int
    ranks: int


def communicator_s(ranks: int) -> float:
    """To set one NCCL communicator up."""
    return _NCCL_S + _NCCL_RANK_S * ranks


@dataclass(frozen=True)
class StartUp:
    """`backend_s`: until the slowest rank has set its communicators up; 0 for Gloo, which was not
    modelled. `process_s` is 0 in files of earlier versions, which left it out."""

    ranks: int
    phases: int
    meet_s: float
    agree_s: float
    groups: tuple[GroupCount, ...]
    backend_s: float
    process_s: float = 0.0

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
            backend_s = min(sum(communicator_s(size) for size in sizes), MOST_NCCL_S)
        return cls(
            ranks, PHASES, MEET_S * ranks, PHASES * PHASE_S * ranks, tuple(counts), backend_s,
            PROCESS_S,
        )  # fmt: skip

    @property
    def total_s(self) -> float:
        return self.process_s + self.meet_s + self.agree_s + self.backend_s

    def describe(self) -> str:
        """The parts, and on what they rest where that is no measurement at this size."""
        beyond = (
            f" (in proportion from {MEASURED_RANKS:,} ranks)" if self.ranks > MEASURED_RANKS else ""
        )
        nccl = f", NCCL {self.backend_s:,.0f} s ({self._basis()})" if self.backend_s else ""
        return (
            f"processes {self.process_s:g} s (assumed), rendezvous {self.meet_s:.2g} s, {self.phases} "
            f"phases {self.agree_s:.2g} s{beyond}{nccl}"
        )

    def describe_groups(self) -> str:
        return ", ".join(f"{g.count:,} × {g.ranks:,} ranks ({g.name})" for g in self.groups)

    def _basis(self) -> str:
        basis = "assumed from published figures for 8 and 32 ranks, not measured"
        if self.ranks > _NCCL_MEASURED_RANKS:
            basis += (
                f"; beyond 32 a line, at most {MOST_NCCL_S:g} s in all, as reported for "
                "thousands of GPUs"
            )
        return basis

    def to_table(self) -> dict[str, Any]:
        return {**asdict(self), "groups": [asdict(group) for group in self.groups]}
