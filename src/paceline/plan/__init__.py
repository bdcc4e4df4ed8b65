"""Decisions, without torch: which tensors travel together, by which algorithm, in which format."""

from paceline.plan.fusion_plan import FusionBuffer, FusionPlan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.plan.size_table import SizeRow, SizeTable

__all__ = [
    "ClusterFacts",
    "FusionBuffer",
    "FusionPlan",
    "ModelFacts",
    "PlanFile",
    "SizeRow",
    "SizeTable",
]
