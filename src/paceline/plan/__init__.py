"""Decisions, without torch: which tensors travel together, by which algorithm, in which format."""

from paceline.plan.fusion_plan import FusionBuffer, FusionPlan

__all__ = ["FusionBuffer", "FusionPlan"]
