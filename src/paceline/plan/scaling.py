"""Efficiency against the number of ranks, and what would raise it.

In: workload, cluster and batch. Out: a curve over numbers of nodes, the largest job that keeps an
efficiency, and what each single improvement would gain. Every point has a plan of its own: the best for
that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.plan.choose_plan import best_plan
from paceline.plan.cluster import Cluster, Link
from paceline.plan.prediction import Prediction, predict
from paceline.plan.wire_format import keeps_float32
from paceline.plan.workload import Affine, Workload

MOST_RANKS = 65_536
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


def scaling_curve(question: Question, cluster: Cluster) -> list[Prediction]:
    """From one node, by doubling, to twice the cluster or more; the cluster itself is among them."""
    return [question.answer(cluster.with_nodes(nodes)) for nodes in node_counts(cluster)]


def node_counts(cluster: Cluster) -> list[int]:
    last = max(2 * cluster.nodes, 16)
    counts = {1 << power for power in range(last.bit_length()) if 1 << power <= last}
    fitting = {n for n in counts | {cluster.nodes} if n * cluster.ranks_per_node <= MOST_RANKS}
    return sorted(fitting | {cluster.nodes})


def largest_ranks(question: Question, cluster: Cluster, efficiency: float = 0.9) -> int | None:
    """The most ranks, by whole nodes up to 65,536, that keep `efficiency`; None if one node does not."""

    def keeps(nodes: int) -> bool:
        return question.answer(cluster.with_nodes(nodes)).efficiency >= efficiency

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
