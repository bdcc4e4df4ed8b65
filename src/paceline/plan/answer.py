"""The answer of `paceline plan`: a prediction, efficiency against the number of ranks, what would help.

In: workload, cluster and batch. Out: plain data for JSON, rows of cells for the terminal and the page.
Every point of the curve has a plan of its own: the best for that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.core.units import format_duration
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import is_priced
from paceline.plan.fusion_plan import keeps_float32
from paceline.plan.optimizer import best_plan
from paceline.plan.prediction import BucketScore, Prediction, predict
from paceline.plan.start_up import StartUp
from paceline.plan.workload import Affine, Workload

Row = tuple[str, ...]
MOST_RANKS = 65_536
# More buckets than these are shown as a number.
_MOST_BUFFERS = 12
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
    """From one node, by doubling, to twice the cluster or more; the cluster itself is among them."""
    sizes = [cluster.with_nodes(nodes) for nodes in node_counts(cluster)]
    return [question.answer(size) for size in sizes if question.reaches(size)]


def node_counts(cluster: Cluster) -> list[int]:
    last = max(2 * cluster.nodes, 16)
    counts = {1 << power for power in range(last.bit_length()) if 1 << power <= last}
    fitting = {n for n in counts | {cluster.nodes} if n * cluster.ranks_per_node <= MOST_RANKS}
    return sorted(fitting | {cluster.nodes})


def largest_ranks(question: Question, cluster: Cluster, efficiency: float = 0.9) -> int | None:
    """The most ranks, by whole nodes up to 65,536, that keep `efficiency`; None if one node does not."""

    def keeps(nodes: int) -> bool:
        size = cluster.with_nodes(nodes)
        return question.reaches(size) and question.answer(size).efficiency >= efficiency

    if not keeps(1):
        return None
    most = max(1, MOST_RANKS // cluster.ranks_per_node)
    low, high = 1, 2
    while high <= most and keeps(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low * cluster.ranks_per_node


@dataclass(frozen=True)
class Advice:
    """`gain` is in images/s, relative."""

    change: str
    gain: float


def advise(question: Question, cluster: Cluster, now: Prediction) -> list[Advice]:
    """Single changes, the most helpful first."""
    changes: Sequence[tuple[str, Callable[[], Prediction]]] = (
        ("the best plan instead of this one", lambda: question.answer(cluster)),
        ("twice the bandwidth between nodes", lambda: question.answer(_links(cluster, 1.0, 0.5))),
        ("half the latency", lambda: question.answer(_links(cluster, 0.5, 1.0))),
        ("twice the batch a GPU", lambda: _double(question).answer(cluster)),
        (_HALF_WIRE, lambda: _half(question).answer(cluster)),
        ("an input that keeps up", lambda: _fed(question).answer(cluster)),
        ("a GPU twice as fast", lambda: _fast(question).answer(cluster)),
    )
    found = [
        Advice(change, ask().images_per_s / now.images_per_s - 1)
        for change, ask in changes
        if (cluster.nodes > 1 or "nodes" not in change)
        and (change != _HALF_WIRE or _is_wide(question))
    ]
    return sorted(found, key=lambda advice: -advice.gain)


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


def _double(question: Question) -> Question:
    return replace(question, batch=2 * question.batch)


def _fed(question: Question) -> Question:
    return replace(question, workload=replace(question.workload, input=Affine(0.0, 0.0)))


def _fast(question: Question) -> Question:
    work = question.workload
    faster = replace(
        work, forward=work.forward.scaled(0.5), backward=work.backward.scaled(0.5),
        update_s=work.update_s / 2,
    )  # fmt: skip
    return replace(question, workload=faster)


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
    # Whether the ranks talk over NCCL.
    is_gpu: bool = True

    @property
    def train_s(self) -> float:
        return self.now.epochs_s(self.epochs, self.samples)

    @property
    def start_up(self) -> StartUp:
        """Until the first step, without the programs' own start and the model's."""
        place = self.cluster
        algorithms = {score.algorithm for score in self.now.scores}
        return StartUp.of(
            place.nodes, place.ranks_per_node, algorithms, buckets=len(self.now.scores),
            nccl=self.is_gpu,
        )  # fmt: skip

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
            "start_up": {**self.start_up.to_table(), "total_s": self.start_up.total_s},
        }


def fact_rows(answer: Answer) -> list[Row]:
    """What it comes to."""
    now, work = answer.now, answer.workload
    sure = f"± {now.uncertainty:.0%}"
    most = "none: one node is below" if answer.most_ranks is None else f"{answer.most_ranks:,}"
    return [
        ("model", f"{work.model}, {work.elements:,} weights; {work.source}"),
        ("cluster", _cluster_words(answer)),
        ("batch", f"{now.batch} a GPU, {now.batch * now.ranks:,} in all"),
        ("step", f"{1e3 * now.step_s:.2f} ms {sure}: compute {1e3 * now.compute_s:.2f}, exposed "
                 f"communication {1e3 * now.exposed_comm_s:.2f}{_slowed(now)}, input "
                 f"{1e3 * now.input_stall_s:.2f}"),
        ("speed", f"{now.images_per_s:,.0f} images/s {sure}, {now.images_per_s_per_gpu:,.0f} a GPU"),
        ("efficiency", f"{now.efficiency:.1%} of {now.ranks:,} times one GPU alone"),
        ("time", f"{answer.epochs:g} epochs of {answer.samples:,} images in "
                 f"{format_duration(answer.train_s)} {sure}"),
        ("start-up", answer.start_up.describe()),
        ("ranks at 90 %", most + _or_more(answer)),
        ("verdict", f"bound by {answer.bound_by}"),
    ]  # fmt: skip


def _slowed(now: Prediction) -> str:
    """Only where it was measured."""
    if not now.hidden_comm_s:
        return ""
    return f", compute slowed by hidden communication {1e3 * now.hidden_comm_s:.2f}"


def _or_more(answer: Answer) -> str:
    """More than 65,536 ranks are not looked at."""
    step = answer.cluster.ranks_per_node
    capped = answer.most_ranks is not None and answer.most_ranks + step > MOST_RANKS
    return " or more" if capped else ""


def _cluster_words(answer: Answer) -> str:
    c = answer.cluster
    inter = c.links * 8e-9 / c.inter.beta_s if c.inter.beta_s else float("inf")
    return (
        f"{c.nodes:,} nodes × {c.ranks_per_node}, {inter:,.3g} Gb/s of payload a node, "
        f"{1e6 * c.inter.alpha_s:.3g} µs a message"
    )


def bucket_rows(answer: Answer) -> list[Row]:
    now = answer.now
    rows: list[Row] = [
        (
            str(number), str(score.tensors), f"{score.bytes / 2**20:.2f}", _way(score),
            f"{1e3 * made.ready_s:.2f}", f"{1e3 * made.start_s:.2f}", f"{1e3 * made.end_s:.2f}",
        )
        for number, (score, made) in enumerate(zip(now.scores, now.exchanges, strict=True), 1)
    ]  # fmt: skip
    if len(rows) <= _MOST_BUFFERS:
        return rows
    half = _MOST_BUFFERS // 2
    gap = ("…", f"{len(rows) - 2 * half} more", "", "", "", "", "")
    return [*rows[:half], gap, *rows[-half:]]


def _way(score: BucketScore) -> str:
    """`ring`, or `ring, float16` where the bucket does not travel as it is held."""
    return score.algorithm + ("" if score.wire == "auto" else f", {score.wire}")


def curve_rows(answer: Answer) -> list[Row]:
    return [
        (f"{p.ranks:,}", f"{p.images_per_s:,.0f}", f"{p.efficiency:.1%}",
         f"{1e3 * p.exposed_comm_s:.2f}")
        for p in answer.curve
    ]  # fmt: skip


def advice_rows(answer: Answer) -> list[Row]:
    return [(advice.change, f"{advice.gain:+.1%}") for advice in answer.advice]
