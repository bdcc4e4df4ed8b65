"""Plans of the gradient all-reduce: buckets, algorithms, number formats, and their predicted cost.

Works without torch.
"""

from paceline.plan.fusion_plan import FusionBucket, FusionPlan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.size_table import SizeRow, SizeTable
from paceline.plan.wires import Wire, register_wire

__all__ = [
    "ClusterFacts",
    "FusionBucket",
    "FusionPlan",
    "ModelFacts",
    "PlanFile",
    "SizeRow",
    "SizeTable",
    "Wire",
    "register_wire",
]
