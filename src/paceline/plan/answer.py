"""The planner's answer as plain data, for JSON, tables and pages.

In: a prediction with what was asked. Out: dictionaries of numbers and words.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.plan.cluster import Cluster
from paceline.plan.prediction import Prediction
from paceline.plan.scaling import Advice
from paceline.plan.workload import Workload


@dataclass(frozen=True)
class Answer:
    """Everything that `paceline plan` tells."""

    workload: Workload
    cluster: Cluster
    now: Prediction
    curve: tuple[Prediction, ...]
    most_ranks: int | None
    advice: tuple[Advice, ...]
    epochs: float
    samples: int

    @property
    def train_s(self) -> float:
        return self.now.epochs_s(self.epochs, self.samples)

    @property
    def bound_by(self) -> str:
        """The verdict: what the step waits for."""
        now = self.now
        if now.input_stall_s > max(now.exposed_comm_s, 0.05 * now.step_s):
            return "input"
        if now.exposed_comm_s > 0.05 * now.step_s:
            return "exposed communication"
        slowed = now.hidden_comm_s > 0.05 * now.step_s
        return "compute that hidden communication slows" if slowed else "compute"

    def to_json(self) -> dict[str, Any]:
        now = self.now
        return {
            "model": self.workload.model,
            "source": self.workload.source,
            "ranks": now.ranks,
            "batch_size": now.batch,
            "global_batch_size": now.batch * now.ranks,
            "images_per_s": now.images_per_s,
            "images_per_s_per_gpu": now.images_per_s_per_gpu,
            "step_s": now.step_s,
            "compute_s": now.compute_s,
            "exposed_comm_s": now.exposed_comm_s,
            "hidden_comm_s": now.hidden_comm_s,
            "input_stall_s": now.input_stall_s,
            "efficiency": now.efficiency,
            "uncertainty": now.uncertainty,
            "bound_by": self.bound_by,
            "epochs": self.epochs,
            "dataset_size": self.samples,
            "train_s": self.train_s,
            "largest_ranks_at_90_percent": self.most_ranks,
            "buffers": [
                {**asdict(score), "start_s": made.start_s, "end_s": made.end_s}
                for score, made in zip(now.scores, now.exchanges, strict=True)
            ],
            "scaling": [
                {
                    "ranks": point.ranks,
                    "images_per_s": point.images_per_s,
                    "efficiency": point.efficiency,
                    "exposed_comm_s": point.exposed_comm_s,
                    "uncertainty": point.uncertainty,
                }
                for point in self.curve
            ],
            "advice": [asdict(advice) for advice in self.advice],
            "cluster": asdict(replace(self.cluster, probed=None)),
        }
