"""`PinnedPlan`: what a resumed run keeps of its checkpoint's fusion plan.

In: a checkpoint, the configuration and the number of ranks. Out: the plan, kept whole where neither the
settings that made it nor the ranks have changed; else its order of the gradients, from which a new one is
made. Either way a resumed run never probes the order again.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import RunConfig
from paceline.core.settings import flatten
from paceline.plan.fusion_plan import FusionPlan
from paceline.train.checkpoint import Checkpoint

_MAKE_PLANS = (
    "comm.algorithm", "comm.sizes", "comm.eta_kib", "comm.fusion_mib", "comm.wire", "comm.plan",
)  # fmt: skip


@dataclass(frozen=True)
class PinnedPlan:
    """`whole` is False where only the order counts."""

    plan: FusionPlan
    whole: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, config: RunConfig, world_size: int) -> PinnedPlan:
        there, here = flatten(checkpoint.config), config.flat()
        # A checkpoint from before these settings was made as by their defaults, and pins what it has.
        usual = RunConfig().flat()
        same = all(there.get(name, usual.get(name)) == here.get(name) for name in _MAKE_PLANS)
        plan = FusionPlan.from_table(checkpoint.plan)
        return cls(plan, same and checkpoint.world_size == world_size)
