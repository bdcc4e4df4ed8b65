"""The answer of `paceline plan`: a prediction, efficiency by ranks, what would help, what it costs.

In: workload, cluster and batch. Out: plain data for JSON; `paceline.cli.plan_page` shows it.
Every point of the curve has a plan of its own: the best for that size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import is_priced
from paceline.plan.fusion_plan import FusionPlan
from paceline.plan.noise import LEAST_SAVING, relative_steps, time_saved
from paceline.plan.optimizer import best_plan
from paceline.plan.wires import keeps_float32
from paceline.planner.accelerators import Accelerator, catalogue
from paceline.planner.analytic_workload import analytic_workload
from paceline.planner.layers import Network
from paceline.planner.memory import MemoryEstimate, memory_on, usable_bytes
from paceline.planner.prediction import Prediction, predict
from paceline.planner.recommend import (
    InputSupply,
    Job,
    Limits,
    Option,
    choose,
    options,
    start_up,
)
from paceline.planner.start_up import StartUp
from paceline.planner.workload import Workload

MOST_RANKS = 65_536
_INPUT = "an input that keeps up"
_HALF_WIRE = "gradients rounded to 16 bits for the wire (--wire fp16)"


@dataclass(frozen=True)
class Question:
    """What stays the same from point to point."""

    workload: Workload
    batch: int
    algorithms: tuple[str, ...]
    wires: tuple[str, ...] = ("auto",)

    def answer(self, cluster: Cluster) -> Prediction:
        plan = best_plan(self.workload, cluster, self.batch, self.algorithms, self.wires)
        return predict(self.workload, cluster, plan, self.batch)

    def reaches(self, cluster: Cluster) -> bool:
        """Whether any of the algorithms has a price on so many ranks."""
        return any(is_priced(name, cluster) for name in self.algorithms)


def scaling_curve(question: Question, cluster: Cluster) -> list[Prediction]:
    """From one node, by doubling, to twice the cluster or more; the cluster itself is among them, and is
    alone where the links between nodes are not known."""
    sizes = [cluster.with_nodes(nodes) for nodes in node_counts(cluster)]
    return [question.answer(size) for size in sizes if question.reaches(size)]


def node_counts(cluster: Cluster) -> list[int]:
    last = max(2 * cluster.nodes, 16) if cluster.has_network else 1
    counts = {1 << power for power in range(last.bit_length()) if 1 << power <= last}
    fitting = {n for n in counts | {cluster.nodes} if n * cluster.ranks_per_node <= MOST_RANKS}
    return sorted(fitting | {cluster.nodes})


def largest_ranks(question: Question, cluster: Cluster, efficiency: float = 0.9) -> int | None:
    """The most ranks, by whole nodes up to 65,536, that keep `efficiency`; None if one node does not. One
    node at the most where the links between nodes are not known."""

    def keeps(nodes: int) -> bool:
        size = cluster.with_nodes(nodes)
        return question.reaches(size) and question.answer(size).efficiency >= efficiency

    if not keeps(1):
        return None
    most = max(1, MOST_RANKS // cluster.ranks_per_node) if cluster.has_network else 1
    low, high = 1, 2
    while high <= most and keeps(high):
        low, high = high, 2 * high
    beyond = range(low + 1, min(high, most + 1))
    low += bisect_left(beyond, True, key=lambda nodes: not keeps(nodes))
    return low * cluster.ranks_per_node


def useful_ranks(question: Question, cluster: Cluster, noise_scale: float, samples: int) -> int:
    """The ranks, from one node by doubling, up to which twice the ranks and batch still save a tenth of
    the time to the same loss, by predicted steps; no batch is larger than an epoch of `samples`."""
    place = cluster.with_nodes(1)
    now = question.answer(place)
    while place.has_network and 2 * place.ranks <= MOST_RANKS:
        double = cluster.with_nodes(2 * place.nodes)
        batch = question.batch * place.ranks
        if not question.reaches(double) or 2 * batch > samples:
            break
        then = question.answer(double)
        if time_saved(noise_scale, batch, 2 * batch, then.step_s / now.step_s) < LEAST_SAVING:
            break
        place, now = double, then
    return place.ranks


def bound_by(now: Prediction) -> str:
    """The verdict: what the step waits for."""
    if now.input_stall_s > max(now.exposed_comm_s, 0.05 * now.step_s):
        return "input"
    if now.exposed_comm_s > 0.05 * now.step_s:
        return "exposed communication"
    slowed = now.hidden_comm_s > 0.05 * now.step_s
    return "compute that hidden communication slows" if slowed else "compute"


@dataclass(frozen=True)
class Advice:
    """`gain` is in images/s, relative; `price` is what the change takes."""

    change: str
    gain: float
    price: str = ""


# A change that gains less is not worth reading about.
_LEAST_GAIN = 0.005


def advise(
    question: Question, cluster: Cluster, now: Prediction, limits: Limits | None = None,
    faster: Mapping[str, Workload] | None = None,
) -> list[Advice]:  # fmt: skip
    """Single changes that one can make, the most helpful first, each with the best plan for it; an input
    that the step waits for most goes before all others, which leave it as it is. `faster` are the same
    model on other accelerators."""
    limits = limits or Limits()
    found: list[tuple[str, str, Callable[[], Prediction]]] = [
        ("the best plan instead of this one", "--plan-out writes it", lambda: question.answer(cluster)),
    ]  # fmt: skip
    larger = min(2 * question.batch, limits.largest(cluster.ranks))
    if larger > question.batch:
        found.append((
            f"--batch-size {larger} a GPU", f"a global batch of {larger * cluster.ranks:,}",
            lambda: replace(question, batch=larger).answer(cluster),
        ))  # fmt: skip
    if _is_wide(question):
        found.append((_HALF_WIRE, "gradients are rounded", lambda: _half(question).answer(cluster)))
    if cluster.nodes > 1:
        rate = node_gbps(cluster)
        found.append((
            f"{format_gbps(2 * rate)} of payload a node instead of {format_gbps(rate)}",
            "twice the links or faster ones",
            lambda: question.answer(_links(cluster, 1.0, 0.5)),
        ))  # fmt: skip
        found.append((
            "messages that start in half the time", "RDMA, fewer switches between nodes",
            lambda: question.answer(_links(cluster, 0.5, 1.0)),
        ))  # fmt: skip
    if now.input_stall_s:
        found.append((
            _INPUT, "more cores, packed shards or nvJPEG (docs/data.md)",
            lambda: replace(question, workload=question.workload.well_fed()).answer(cluster),
        ))  # fmt: skip
    if cluster.has_network and 2 * cluster.ranks <= MOST_RANKS:
        double = cluster.with_nodes(2 * cluster.nodes)
        # At the limit of the global batch each GPU has less of it.
        batch = min(question.batch, limits.largest(double.ranks))
        if batch >= 1 and question.reaches(double):
            change, price = f"{double.nodes:,} nodes", "twice the GPUs"
            if batch < question.batch:
                change += f", batch {batch:,} a GPU"
                price += f", a global batch of {batch * double.ranks:,}"
            found.append((change, price, lambda: replace(question, batch=batch).answer(double)))
    for name, work in (faster or {}).items():
        there = replace(question, workload=replace(work, input=question.workload.input))
        found.append((name, "other GPUs", partial(there.answer, cluster)))
    advice = [Advice(change, ask().images_per_s / now.images_per_s - 1, price)
              for change, price, ask in found]  # fmt: skip
    starved = bound_by(now) == "input"
    return sorted(
        (one for one in advice if one.gain >= _LEAST_GAIN),
        key=lambda one: (not (starved and one.change == _INPUT), -one.gain),
    )


def faster_accelerators(
    net: Network | None, chip: Accelerator | None, work: Workload, batch: int
) -> dict[str, Workload]:
    """The same model on the next faster accelerator of the catalogue with memory for the batch, where
    this one is from it."""
    if net is None or chip is None or not work.source.startswith("layers"):
        return {}
    faster = sorted(
        (gpu for gpu in catalogue().values() if gpu.flops_per_s * gpu.memory_bytes_per_s
         > chip.flops_per_s * chip.memory_bytes_per_s
         and memory_on(gpu, net, batch).total <= usable_bytes(gpu)),
        key=lambda gpu: gpu.flops_per_s * gpu.memory_bytes_per_s,
    )[:1]  # fmt: skip
    return {f"{gpu.name} instead of {chip.name}": analytic_workload(net, gpu) for gpu in faster}


def node_gbps(cluster: Cluster) -> float:
    """Payload of all links of a node."""
    return cluster.links * 8e-9 / cluster.inter.beta_s if cluster.inter.beta_s else math.inf


def format_gbps(rate: float) -> str:
    """
    >>> format_gbps(25600), format_gbps(0.016)
    ('25,600 Gb/s', '0.016 Gb/s')
    """
    return f"{rate:,.0f} Gb/s" if rate >= 100 else f"{rate:.3g} Gb/s"


def _links(cluster: Cluster, alpha: float, beta: float) -> Cluster:
    inter, intra = cluster.inter, cluster.intra
    return replace(
        cluster,
        inter=Link(inter.alpha_s * alpha, inter.beta_s * beta),
        intra=Link(intra.alpha_s * alpha, intra.beta_s),
        launch_s=cluster.launch_s * alpha,
    )


def _half(question: Question) -> Question:
    return replace(question, wires=(*question.wires, "float16"))


def _is_wide(question: Question) -> bool:
    """Most of what travels is held in 32 bits, and nothing narrower was allowed."""
    full = sum(g.elements for g in question.workload.gradients if not g.half)
    return 2 * full > question.workload.elements and all(map(keeps_float32, question.wires))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything that `paceline plan` tells."""

    workload: Workload
    cluster: Cluster
    now: Prediction
    curve: tuple[Prediction, ...]
    most_ranks: int | None
    advice: tuple[Advice, ...]
    job: Job
    limits: Limits = field(default_factory=Limits)
    options: tuple[Option, ...] = ()
    recommended: bool = False
    memory: MemoryEstimate | None = None
    memory_bytes: float = 0.0
    supply: InputSupply | None = None
    # Where a noise scale was given: up to which ranks a doubling saves time to the same loss.
    noise_scale: float = 0.0
    useful_ranks: int | None = None
    # What was assumed of the cluster, by argument of `gpu_cluster`.
    assumed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, question: Question, cluster: Cluster, plan: FusionPlan, *, job: Job, limits: Limits,
        net: Network | None = None, gpu: Accelerator | None = None, noise_scale: float = 0.0,
        **known: Any,
    ) -> Answer:  # fmt: skip
        """What `plan` takes, and what else could be chosen. `net` and `gpu` are the layers and the chip
        behind the workload, None where it was profiled; `known` are further fields of the answer."""
        work = question.workload
        now = predict(work, cluster, plan, question.batch)
        faster = faster_accelerators(net, gpu, work, question.batch)
        if noise_scale:
            known["useful_ranks"] = useful_ranks(question, cluster, noise_scale, job.samples)
        return cls(
            workload=work, cluster=cluster, now=now, job=job, limits=limits,
            curve=tuple(scaling_curve(question, cluster)),
            most_ranks=largest_ranks(question, cluster),
            advice=tuple(advise(question, cluster, now, limits, faster)),
            options=tuple(options(question, cluster, limits, job)),
            memory_bytes=gpu.memory_bytes if gpu else 0.0, noise_scale=noise_scale, **known,
        )  # fmt: skip

    @property
    def option(self) -> Option:
        """What the answer itself costs."""
        return self.job.option(self.now, self.cluster.nodes)

    @property
    def chosen(self) -> Option | None:
        """The row of the table that meets --target-minutes and --budget."""
        return choose(self.options, self.limits)

    @property
    def needed_images_per_s(self) -> float:
        """What the GPUs of one node take, if the input keeps up."""
        fed = self.now.step_s - self.now.input_stall_s
        return self.cluster.ranks_per_node * self.now.batch / fed

    @property
    def train_s(self) -> float:
        return self.now.epochs_s(self.job.epochs, self.job.samples)

    @property
    def start_up(self) -> StartUp:
        """Predicted parts of the time until the first step; the job may have another time as given."""
        return start_up(self.now, self.cluster.nodes, nccl=self.job.nccl)

    def same_loss(self, point: Prediction) -> float:
        """Time to the same loss with a point of the curve, as a share of that with its first point."""

        def time_of(one: Prediction) -> float:
            return relative_steps(self.noise_scale, one.ranks * one.batch) * one.step_s

        return time_of(point) / time_of(self.curve[0])

    @property
    def bound_by(self) -> str:
        return bound_by(self.now)

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
            "epochs": self.job.epochs,
            "dataset_size": self.job.samples,
            "steps": now.steps(self.job.epochs, self.job.samples),
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
                    "time_to_same_loss": self.same_loss(point) if self.noise_scale else None,
                }
                for point in self.curve
            ],
            "noise_scale": self.noise_scale or None,
            "largest_ranks_that_save_time": self.useful_ranks,
            "advice": [asdict(advice) for advice in self.advice],
            "recommended_batch": self.recommended,
            "memory": None
            if self.memory is None
            else {**asdict(self.memory), "total": self.memory.total},
            "largest_batch": self.limits.memory_batch,
            "largest_batch_of_the_profile": self.limits.timed_batch,
            "largest_global_batch": {"images": self.limits.global_batch, "why": self.limits.why},
            "extrapolated": self.workload.is_extrapolated(now.batch),
            "needed_images_per_s_per_node": self.needed_images_per_s,
            "input": None if self.supply is None else asdict(self.supply),
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
