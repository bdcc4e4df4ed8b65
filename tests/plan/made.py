"""Small workloads and clusters for the planner's tests."""

from __future__ import annotations

from paceline.plan.cluster import Cluster, Link
from paceline.plan.optimizer import Gradient
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
