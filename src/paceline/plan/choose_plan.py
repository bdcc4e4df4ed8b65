"""Plans for a workload on a cluster: the best one, and those that it is held against.

In: workload, cluster, batch of a rank, the algorithms and wire formats that may be used. Out: a
`FusionPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.buffer_cost import BufferCost
from paceline.plan.cluster import Cluster
from paceline.plan.collective_cost import COSTS, all_reduce_s
from paceline.plan.fusion_plan import FusionBuffer, FusionPlan
from paceline.plan.merged_gradient import merge_gradients
from paceline.plan.optimal_plan import Buffer, Costs, optimal_buffers
from paceline.plan.straggler import RANK_SPREAD, slowest_of
from paceline.plan.workload import Workload

ALGORITHMS = tuple(COSTS)


def best_plan(
    workload: Workload, cluster: Cluster, batch: int, algorithms: Sequence[str] = ALGORITHMS,
    wires: Sequence[str] = ("auto",), spread: float = RANK_SPREAD,
) -> FusionPlan:  # fmt: skip
    """Boundaries, algorithms and formats that leave the least communication exposed; a buffer is
    rounded to a format only where that ends the exchange sooner."""
    cost = BufferCost(workload.gradients, cluster, algorithms, wires)
    ready = _slowest_ready(workload, cluster, batch, spread)
    found = optimal_buffers(Costs(ready, cost.wires, cost.of), cost.seconds)
    return _with_names(workload, cost, found)


def merged_plan(
    workload: Workload, cluster: Cluster, batch: int, algorithm: str = "ring", wire: str = "auto"
) -> FusionPlan:
    """By the merged-gradient rule, which knows one algorithm as a + b·m."""
    cost = BufferCost(workload.gradients, cluster, (algorithm,), (wire,))
    sizes = [cost.bytes(i, i + 1) for i in range(len(workload.gradients))]
    start_up, byte_s = affine_cost(algorithm, cluster)
    ready = _slowest_ready(workload, cluster, batch, RANK_SPREAD)
    groups = merge_gradients(ready, sizes, start_up, byte_s)
    found = [Buffer((group[0], group[-1] + 1), cost.wires[0]) for group in groups]
    return _with_names(workload, cost, found)


def threshold_plan(
    workload: Workload, cluster: Cluster, threshold: int,
    algorithms: Sequence[str] = ("native",), wire: str = "auto",
) -> FusionPlan:  # fmt: skip
    """A buffer is closed once it holds `threshold` bytes; 0 sends every gradient alone."""
    cost = BufferCost(workload.gradients, cluster, algorithms, (wire,))
    found, first = [], 0
    for stop in range(1, len(workload.gradients) + 1):
        if cost.bytes(first, stop) >= threshold or stop == len(workload.gradients):
            found.append(Buffer((first, stop), cost.wires[0]))
            first = stop
    return _with_names(workload, cost, found)


def _slowest_ready(workload: Workload, cluster: Cluster, batch: int, spread: float) -> list[float]:
    """On the slowest rank, for which every exchange waits."""
    slow = slowest_of(cluster.ranks, spread)
    return [ready * slow for ready in workload.ready_s(batch)]


def affine_cost(algorithm: str, cluster: Cluster) -> tuple[float, float]:
    """a and b of the algorithm's cost between a few KB and some MB."""
    small, large = 4096.0, 4.0 * 2**20
    near, far = (float(all_reduce_s(algorithm, cluster, size)) for size in (small, large))
    slope = (far - near) / (large - small)
    return max(0.0, near - slope * small), slope


def _with_names(workload: Workload, cost: BufferCost, found: Sequence[Buffer]) -> FusionPlan:
    buffers = []
    for (first, stop), wire in found:
        names = tuple(gradient.name for gradient in workload.gradients[first:stop])
        algorithm, beside = cost.names(wire, first, stop)
        buffers.append(FusionBuffer(names, algorithm, wire, "" if beside == algorithm else beside))
    return FusionPlan(tuple(buffers))
