"""Computes what `paceline plan` shows: step time, efficiency by number of ranks, and cost.

`paceline.cli.plan_page` displays the answer. Every point of the scaling curve uses the best plan for its
number of nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.plan.cluster import Cluster
from paceline.plan.cost import is_priced
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.optimizer import best_plan
from paceline.planner.memory import MemoryEstimate
from paceline.planner.prediction import Prediction, predict
from paceline.planner.recommend import Job, Limits, Option, choose, options, start_up
from paceline.planner.start_up import StartUp
from paceline.planner.workload import Workload

MAX_RANKS = 65_536
# A smaller share of a step is not the bottleneck.
_NOTABLE = 0.05
# The attributes of a prediction in `Answer.to_json`, for the cluster and for a point of the curve.
_STEP_FIGURES = (
    "ranks", "images_per_s", "images_per_s_per_gpu", "step_s", "compute_s", "exposed_comm_s",
    "hidden_comm_s", "input_stall_s", "efficiency", "uncertainty",
)  # fmt: skip
_CURVE_FIGURES = ("ranks", "images_per_s", "efficiency", "exposed_comm_s", "uncertainty")


@dataclass(frozen=True)
class Question:
    """A job to predict: everything except the cluster, so that several clusters can be compared.

    Attributes:
        workload: The times of a step of one rank without communication.
        batch: The batch of one rank.
        algorithms: The all-reduce algorithms that a plan may use.
        wires: The wire formats that a plan may use.
    """

    workload: Workload
    batch: int
    algorithms: tuple[str, ...]
    wires: tuple[str, ...] = ("auto",)

    def answer(self, cluster: Cluster) -> Prediction:
        """Predicts the step time on a cluster, with the best plan for it."""
        plan = best_plan(self.workload, cluster, self.batch, self.algorithms, self.wires)
        return predict(self.workload, cluster, plan, self.batch)

    def is_priced(self, cluster: Cluster) -> bool:
        """Returns True if the time of at least one allowed all-reduce algorithm can be predicted."""
        return any(is_priced(name, cluster) for name in self.algorithms)


def scaling_curve(question: Question, cluster: Cluster) -> list[Prediction]:
    """Predicts the step time for 1, 2, 4, … nodes and for the number of nodes of the cluster.

    The powers of two go up to twice the nodes of the cluster, or to 16 if that is more. If the links
    between nodes are unknown, the curve contains only the cluster.
    """
    last = max(2 * cluster.nodes, 16) if cluster.has_network else 1
    counts = {1 << power for power in range(last.bit_length()) if 1 << power <= last}
    fitting = {nodes for nodes in counts if nodes * cluster.ranks_per_node <= MAX_RANKS}
    sizes = [cluster.with_nodes(nodes) for nodes in sorted(fitting | {cluster.nodes})]
    return [question.answer(size) for size in sizes if question.is_priced(size)]


def largest_ranks(question: Question, cluster: Cluster, efficiency: float = 0.9) -> int | None:
    """Finds the largest number of ranks whose scaling efficiency is at least `efficiency`.

    The search goes over whole nodes up to 65,536 ranks. If the links between nodes are unknown, it ends
    after one node.

    Returns:
        The number of ranks, or None if even one node is less efficient.
    """

    def keeps(nodes: int) -> bool:
        size = cluster.with_nodes(nodes)
        return question.is_priced(size) and question.answer(size).efficiency >= efficiency

    if not keeps(1):
        return None
    most = max(1, MAX_RANKS // cluster.ranks_per_node) if cluster.has_network else 1
    low, high = 1, 2
    while high <= most and keeps(high):
        low, high = high, 2 * high
    beyond = range(low + 1, min(high, most + 1))
    low += bisect_left(beyond, True, key=lambda nodes: not keeps(nodes))
    return low * cluster.ranks_per_node


def bound_by(now: Prediction) -> str:
    """Names what limits the speed of a predicted step."""
    if now.input_stall_s > max(now.exposed_comm_s, _NOTABLE * now.step_s):
        return "input"
    if now.exposed_comm_s > _NOTABLE * now.step_s:
        return "exposed communication"
    is_slowed = now.hidden_comm_s > _NOTABLE * now.step_s
    return "compute that hidden communication slows" if is_slowed else "compute"


def node_gbps(cluster: Cluster) -> float:
    """Returns the bandwidth of all links of a node together in Gb/s, without protocol overhead."""
    return cluster.links * 8e-9 / cluster.inter.beta_s if cluster.inter.beta_s else math.inf


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The results of `paceline plan`.

    Attributes:
        workload: The times of a step of one rank without communication.
        cluster: The cluster in question.
        now: The prediction for this cluster.
        curve: The predictions of `scaling_curve`.
        most_ranks: The largest number of ranks with at least 90 % efficiency; None if even one node
            is less efficient.
        job: The length, data size and prices of the training.
        limits: The limits on batch, time and cost.
        options: Predictions for other numbers of nodes and batch sizes.
        recommended: True if the planner chose the batch because the user gave none.
        memory: The memory that a step needs; None if the layers of the model are unknown.
        memory_bytes: The memory of the accelerator; 0 if unknown.
        assumed: Texts about assumed properties of the cluster, by argument of `gpu_cluster`.
    """

    workload: Workload
    cluster: Cluster
    now: Prediction
    curve: tuple[Prediction, ...]
    most_ranks: int | None
    job: Job
    limits: Limits = field(default_factory=Limits)
    options: tuple[Option, ...] = ()
    recommended: bool = False
    memory: MemoryEstimate | None = None
    memory_bytes: float = 0.0
    assumed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, question: Question, cluster: Cluster, plan: FusionPlan, *, job: Job, limits: Limits,
        **fields: Any,
    ) -> Answer:  # fmt: skip
        """Predicts a job with a plan, and compares it with other numbers of nodes and batch sizes.

        Args:
            question: The workload, the batch, and the allowed algorithms and wire formats.
            cluster: The cluster in question.
            plan: The buckets and algorithms of the gradient all-reduce.
            job: The length, data size and prices of the training.
            limits: The limits on batch, time and cost.
            **fields: Values of further attributes of the answer.
        """
        return cls(
            workload=question.workload,
            cluster=cluster,
            now=predict(question.workload, cluster, plan, question.batch),
            job=job,
            limits=limits,
            curve=tuple(scaling_curve(question, cluster)),
            most_ranks=largest_ranks(question, cluster),
            options=tuple(options(question, cluster, limits, job)),
            **fields,
        )

    @property
    def option(self) -> Option:
        """Time and cost of the job on the cluster in question."""
        return self.job.option(self.now, self.cluster.nodes)

    @property
    def chosen(self) -> Option | None:
        """The best of `options` that meets --target-minutes and --budget, or None if none does."""
        return choose(self.options, self.limits)

    @property
    def needed_images_per_s(self) -> float:
        """Images per second that the input pipeline of a node must deliver to keep its GPUs busy."""
        fed_s = self.now.step_s - self.now.input_stall_s
        return self.cluster.ranks_per_node * self.now.batch / fed_s

    @property
    def train_s(self) -> float:
        return self.now.epochs_s(self.job.epochs, self.job.samples)

    @property
    def start_up(self) -> StartUp:
        """The predicted time until the first step, even if --startup-s replaces it."""
        return start_up(self.now, self.cluster.nodes, nccl=self.job.nccl)

    @property
    def bound_by(self) -> str:
        return bound_by(self.now)

    def to_json(self) -> dict[str, Any]:
        """Returns all results as plain data."""
        now = self.now
        memory = self.memory
        return {
            "model": self.workload.model,
            "source": self.workload.source,
            "batch_size": now.batch,
            "global_batch_size": now.batch * now.ranks,
            **{name: getattr(now, name) for name in _STEP_FIGURES},
            "bound_by": self.bound_by,
            "epochs": self.job.epochs,
            "dataset_size": self.job.samples,
            "steps": now.steps(self.job.epochs, self.job.samples),
            "train_s": self.train_s,
            "largest_ranks_at_90_percent": self.most_ranks,
            "buffers": [
                {**asdict(score), "start_s": exchange.start_s, "end_s": exchange.end_s}
                for score, exchange in zip(now.scores, now.exchanges, strict=True)
            ],
            "scaling": [
                {name: getattr(point, name) for name in _CURVE_FIGURES} for point in self.curve
            ],
            "recommended_batch": self.recommended,
            "memory": None if memory is None else {**asdict(memory), "total": memory.total},
            "largest_batch": self.limits.memory_batch,
            "largest_batch_of_the_profile": self.limits.timed_batch,
            "largest_global_batch": {"images": self.limits.global_batch, "why": self.limits.why},
            "extrapolated": self.workload.is_extrapolated(now.batch),
            "needed_images_per_s_per_node": self.needed_images_per_s,
            "this": self.option.to_table(),
            "options": [option.to_table() for option in self.options],
            "chosen": None if self.chosen is None else self.chosen.to_table(),
            "cluster": asdict(replace(self.cluster, probed=None)),
            "assumed": dict(self.assumed),
            "start_up": {
                **self.start_up.to_table(),
                "total_s": self.option.startup_s,
                "given": self.job.startup_s is not None,
            },
        }
