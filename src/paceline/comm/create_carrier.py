"""The carrier that a plan needs.

In: the group, the settings and the plan, equal on all ranks. Out: the backend's own all-reduce in the
caller's thread where one native buffer is all; NCCL's on its stream where all is native; else the
communication thread. Where it makes process groups, all ranks make them at once.
"""

from __future__ import annotations

from paceline.comm.carrier import Carrier, DirectCarrier
from paceline.comm.group import Group
from paceline.comm.hybrid_carrier import HybridCarrier
from paceline.comm.native_carrier import NativeCarrier
from paceline.comm.process_groups import ProcessGroups
from paceline.comm.settings import BACKEND_GRACE_S, CommSettings
from paceline.plan.fusion_plan import FusionPlan


def create_carrier(group: Group, settings: CommSettings, plan: FusionPlan) -> Carrier:
    native = all(b.algorithm == b.beside_algorithm == "native" for b in plan.buffers)
    if native and len(plan.buffers) == 1 and plan.buffers[0].wire == "auto":
        return DirectCarrier(group)
    alone = native and group.backend == "nccl"
    made: list[Carrier] = []

    def make() -> None:
        groups = ProcessGroups(
            group.topology,
            settings.group_size or None,
            timeout_s=settings.timeout_s,
            grace_s=BACKEND_GRACE_S,
            subgroups=False if alone else None,
        )
        made.append(NativeCarrier(group, groups) if alone else HybridCarrier(group, groups))

    group.watched("the making of process groups", make)
    return made[0]
