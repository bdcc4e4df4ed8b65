"""Which of a buffer's two messages is the bulk: the planner and the communication module agree."""

from __future__ import annotations

import pytest

from paceline.comm.exchange import SIGNALS
from paceline.comm.messages import Message, plan_messages
from paceline.core.flat_layout import FlatLayout, TensorSpec
from paceline.plan import FusionPlan
from paceline.plan.choose_plan import best_plan
from paceline.plan.cluster import Cluster, Link
from paceline.plan.collective_cost import all_reduce_s
from paceline.plan.plan_score import score_plan
from paceline.plan.workload import Affine, Gradient, Workload


def workload(half: list[int], full: list[int]) -> Workload:
    """All ready at once, so that one buffer is best."""
    sizes = [(n, True) for n in half] + [(n, False) for n in full]
    gradients = tuple(Gradient(f"t{i}", n, h, 0.0) for i, (n, h) in enumerate(sizes))
    return Workload("made", gradients, Affine(1e-3, 0), Affine(1e-3, 0), 0.0)


def meeting_at(size: float) -> Cluster:
    """Eight ranks, where tree and ring take as long for `size` bytes, and the tree less for fewer."""
    beta = 1e-9
    cluster = Cluster(8, 1, Link(0, 0), Link(4.25 * beta * size / 8, beta))
    ring, tree = (float(all_reduce_s(name, cluster, size)) for name in ("ring", "tree"))
    assert ring == pytest.approx(tree)
    return cluster


def sent(work: Workload, plan: FusionPlan) -> list[Message]:
    layouts = {
        dtype: FlatLayout.build(
            [TensorSpec(g.name, (g.elements,), dtype) for g in work.gradients if g.half == half]
        )
        for dtype, half in (("float32", False), ("float16", True))
    }
    (messages,) = plan_messages(plan, layouts, len(SIGNALS) + len(work.gradients))
    return messages


@pytest.mark.parametrize(
    ("half", "full", "meet", "by_format"),
    [
        # fp16 6464 bytes, fp32 6400, and 6492 with the signals, which join after the choice.
        ([3232], [96] * 15 + [160], 6490, {"float16": "tree", "float32": "ring"}),
        # As large: fp32 is the bulk.
        ([3200], [96] * 15 + [160], 6450, {"float16": "tree", "float32": "ring"}),
        # fp16 200 bytes, but 6400 with padding; fp32 6144.
        ([1] * 100, [1536], 3000, {"float16": "tree", "float32": "ring"}),
    ],
)
def test_each_message_goes_by_the_algorithm_that_was_chosen_for_it(
    half: list[int], full: list[int], meet: float, by_format: dict[str, str]
) -> None:
    work, cluster = workload(half, full), meeting_at(meet)
    plan = best_plan(work, cluster, 1, ("ring", "tree"))
    messages = sent(work, plan)
    assert {message.dtype: message.algorithm for message in messages} == by_format
    # What the planner expects is the cost of these very messages, but for padding.
    signals = 4 * (len(SIGNALS) + len(work.gradients))
    sizes = {"float16": 2 * sum(half), "float32": 4 * sum(full) + signals}
    cost = sum(float(all_reduce_s(m.algorithm, cluster, sizes[m.dtype])) for m in messages)
    (score,) = score_plan(plan, work, cluster, 1)
    assert score.cost_s == pytest.approx(cost, rel=1e-12)
