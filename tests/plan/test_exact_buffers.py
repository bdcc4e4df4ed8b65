"""What ends as soon stays exact, whether it travels alone or joined."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan import FusionPlan
from paceline.plan.choose_plan import best_plan
from paceline.plan.cluster import Cluster, Link
from paceline.plan.overlap import exchanges
from paceline.plan.plan_score import score_plan
from plan.made import made_workload

BOTH = ("auto", "float16")


def slow(nodes: int, cast_s: float = 1e-10) -> Cluster:
    return Cluster(nodes, 1, Link(0, 0), Link(1e-5, 1e-9), cast_s=cast_s)


def test_joining_rounds_nothing() -> None:
    """Seen: t0 and t1, each hidden in 32 bits, became one buffer that was hidden only in 16."""
    work = made_workload((3_500_000, 4_000_000, 4_000_000), ready=(0.1, 0.5, 1.0))
    cluster = slow(2)
    plan = best_plan(work, cluster, 256, ("ring",), BOTH)
    assert [(b.tensors, b.wire) for b in plan.buffers] == [
        (("t0",), "auto"), (("t1",), "auto"), (("t2",), "float16"),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4_000_000), st.floats(0, 1)), min_size=2, max_size=6),
    st.integers(1, 256), st.floats(0, 1e-9),
)  # fmt: skip
def test_no_buffer_could_be_more_exact_and_no_two_could_be_one(
    rows: list[tuple[int, float]], batch: int, cast_s: float
) -> None:
    work = made_workload(tuple(size for size, _ in rows), tuple(sorted(at for _, at in rows)))
    cluster = slow(4, cast_s)

    def last_end_s(plan: FusionPlan) -> float:
        scores = score_plan(plan, work, cluster, batch)
        return exchanges([s.ready_s for s in scores], [s.cost_s for s in scores])[-1].end_s

    plan = best_plan(work, cluster, batch, ("ring",), BOTH, spread=0.0)
    end = last_end_s(plan) * (1 + 1e-9)
    for at, buffer in enumerate(plan.buffers):
        before, behind = plan.buffers[:at], plan.buffers[at + 1 :]
        if buffer.wire == "float16":
            exact = replace(buffer, wire="auto")
            assert last_end_s(FusionPlan((*before, exact, *behind))) > end
        if behind and buffer.wire == behind[0].wire == "auto":
            both = replace(buffer, tensors=buffer.tensors + behind[0].tensors)
            assert last_end_s(FusionPlan((*before, both, *behind[1:]))) > end
