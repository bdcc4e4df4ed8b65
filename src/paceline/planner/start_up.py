"""Estimates the time before the first step, in which ranks start, meet and create communicators.

The times of the key-value store were measured (`records/control-plane`). Those of starting
processes and of NCCL are assumptions, because Paceline has run on at most four ranks over NCCL.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from paceline.plan.schedules import NATIVE, parts_used
from paceline.plan.steps import Groups

# The assumed time to start the interpreter, import torch, build the model and load the first kernels.
PROCESS_S = 20.0
# The largest number of agreement phases of a training; a test counts them.
PHASES = 12
# The CPU time of the store's single thread per rank, for the rendezvous and for each phase; measured with
# up to 1,024 ranks.
MEET_S = 0.3e-3
PHASE_S = 50e-6
# An NCCL communicator of p ranks needs `_NCCL_S + p · _NCCL_RANK_S`. Users of V100 and InfiniBand
# measured 16.3 s for 8 communicators of 8 ranks and 130 s for 32 of 32 ranks (NVIDIA/nccl issue 534,
# 2021). The sum over the communicators of a rank is limited to the longest initialization that was
# reported for thousands of GPUs, 2.5 minutes (issue 1156, 2024).
_NCCL_S = 1.35
_NCCL_RANK_S = 0.086
MOST_NCCL_S = 150.0


def communicator_s(ranks: int) -> float:
    """Estimates the seconds to create one NCCL communicator of the given number of ranks."""
    return _NCCL_S + _NCCL_RANK_S * ranks


@dataclass(frozen=True)
class StartUp:
    """The parts of the start-up, in seconds.

    Attributes:
        ranks: The number of ranks.
        phases: How often all ranks compare something, such as settings, over the key-value store.
        meet_s: The time of the rendezvous.
        agree_s: The time of all these comparisons.
        backend_s: The time in which the slowest rank creates its NCCL communicators; 0 for Gloo.
        process_s: The time to start the processes.
    """

    ranks: int
    phases: int
    meet_s: float
    agree_s: float
    backend_s: float
    process_s: float

    @classmethod
    def of(
        cls, nodes: int, ranks_per_node: int, algorithms: Collection[str], *, buckets: int = 2,
        nccl: bool = True,
    ) -> StartUp:  # fmt: skip
        """Estimates the start-up of a job.

        Args:
            nodes: The number of nodes.
            ranks_per_node: The number of ranks in a node.
            algorithms: The all-reduce algorithms of the plan.
            buckets: The number of buckets of the plan.
            nccl: True if ranks communicate over NCCL, False for Gloo.
        """
        ranks = nodes * ranks_per_node
        backend_s = 0.0
        if nccl and ranks > 1:
            # Two nodes need the same kinds of groups as more nodes, and this computation is faster.
            example = Groups.of_nodes([ranks_per_node] * min(nodes, 2), nested=True)
            used = parts_used(algorithms, example)
            # One group for the run, and one for the exchange unless it is a single native all-reduce.
            shared = set(algorithms) <= {NATIVE} and buckets == 1
            sizes = [ranks] if shared else [ranks, ranks]
            # A rank belongs to the group of its row, and to the group of its column or of the masters.
            if "rows" in used:
                sizes.append(ranks_per_node)
            if used & {"masters", "columns"}:
                sizes.append(nodes)
            backend_s = min(sum(map(communicator_s, sizes)), MOST_NCCL_S)
        agree_s = PHASES * PHASE_S * ranks
        return cls(ranks, PHASES, MEET_S * ranks, agree_s, backend_s, PROCESS_S)

    @property
    def total_s(self) -> float:
        return self.process_s + self.meet_s + self.agree_s + self.backend_s

    def describe(self) -> str:
        """Describes how long each part of the start-up takes, in one line; marks assumed times."""
        nccl = f", NCCL {self.backend_s:,.0f} s (assumed)" if self.backend_s else ""
        return (
            f"processes {self.process_s:g} s (assumed), rendezvous {self.meet_s:.2g} s, {self.phases} "
            f"phases {self.agree_s:.2g} s{nccl}"
        )

    def to_table(self) -> dict[str, Any]:
        return asdict(self)
