"""Small workloads and clusters for the planner's tests."""

from __future__ import annotations

from paceline.plan.cluster import Cluster, Link, slowest_of
from paceline.plan.cost import all_reduce_s
from paceline.plan.fusion_plan import FusionBucket, FusionPlan
from paceline.plan.optimizer import Gradient
from paceline.plan.wires import travelling
from paceline.planner.workload import Affine, Workload


def made_workload(
    sizes: tuple[int, ...] = (100, 50, 200, 10), ready: tuple[float, ...] | None = None,
    half: bool = False,
) -> Workload:  # fmt: skip
    count = len(sizes)
    shares = ready or tuple((i + 1) / count for i in range(count))
    return Workload(
        model="made",
        gradients=tuple(
            Gradient(f"t{i}", size, half, share)
            for i, (size, share) in enumerate(zip(sizes, shares, strict=True))
        ),
        forward=Affine(1e-3, 1e-4),
        backward=Affine(2e-3, 2e-4),
        update_s=5e-4,
    )


def made_cluster(nodes: int = 4, ranks_per_node: int = 4, **others: float) -> Cluster:
    values = {"gamma_s": 1e-10, **others}
    return Cluster(
        nodes,
        ranks_per_node,
        Link(2e-6, 1e-10),
        Link(1e-5, 1e-9),
        links=1,
        **values,  # type: ignore[arg-type]
    )


def merged_plan(
    work: Workload, cluster: Cluster, batch: int, algorithm: str = "ring", wire: str = "auto"
) -> FusionPlan:
    """By the merged-gradient rule (MG-WFBP, Shi et al. 2018), which knows an exchange as a + b·m: a group
    joins the next gradient if that is ready before the group's message has got through its start-up."""
    near, far = (float(all_reduce_s(algorithm, cluster, size)) for size in (4096.0, 2.0**22))
    byte_s = (far - near) / (2.0**22 - 4096)
    start_s = max(0.0, near - byte_s * 4096)
    slow = slowest_of(cluster.ranks)
    ready = [at * slow for at in work.ready_s(batch)]
    sizes = [sum(travelling(g.elements * g.half, g.elements * (not g.half), wire)[:2])
             for g in work.gradients]  # fmt: skip
    buckets, free, first = [], 0.0, 0
    for last in range(len(ready)):
        begins = max(free, ready[last])
        if last + 1 < len(ready) and ready[last + 1] < begins + start_s:
            continue
        names = tuple(g.name for g in work.gradients[first : last + 1])
        free = begins + start_s + byte_s * sum(sizes[first : last + 1])
        buckets.append(FusionBucket(names, algorithm, wire))
        first = last + 1
    return FusionPlan(tuple(buckets))
