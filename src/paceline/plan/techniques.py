"""What each technique of the paper gains, one after the other.

In: workload, cluster, batch. Out: predictions for no fusion, fusion, hierarchical, hybrid and the best
plan, each with overlap. "None" is a ring for every gradient, as it becomes ready.
"""

from __future__ import annotations

from paceline.plan.choose_plan import ALGORITHMS, best_plan, threshold_plan
from paceline.plan.cluster import Cluster
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.prediction import Prediction, predict
from paceline.plan.workload import Workload

TECHNIQUES = ("none", "fusion", "hierarchical", "hybrid", "best plan")


def technique_plan(name: str, workload: Workload, cluster: Cluster, batch: int) -> FusionPlan:
    """Fusion takes the threshold, of the powers of two, that suits it best."""
    if name == "none":
        return threshold_plan(workload, cluster, 0, ("ring",))
    if name == "best plan":
        return best_plan(workload, cluster, batch, ALGORITHMS)
    allowed = {
        "fusion": ("ring",),
        "hierarchical": ("hierarchical",),
        "hybrid": ("hierarchical", "ring"),
    }[name]
    plans = [threshold_plan(workload, cluster, 1 << power, allowed) for power in range(16, 29)]
    return min(plans, key=lambda plan: predict(workload, cluster, plan, batch).step_s)


def techniques(workload: Workload, cluster: Cluster, batch: int) -> dict[str, Prediction]:
    return {
        name: predict(workload, cluster, technique_plan(name, workload, cluster, batch), batch)
        for name in TECHNIQUES
    }
