"""The best plan: never beaten, rounds only if that pays, and counts the messages that are sent."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.comm import SIGNALS
from paceline.comm.exchange import Message, plan_messages
from paceline.core.errors import ConfigError
from paceline.plan import FusionBucket, FusionPlan, PlanFile
from paceline.plan.cluster import Cluster, Link
from paceline.plan.cost import all_reduce_s
from paceline.plan.fusion_plan import FlatLayout, TensorSpec, signal_bytes
from paceline.plan.optimizer import (
    Gradient,
    best_plan,
    limited_cuts,
    optimal_cuts,
)
from paceline.plan.wires import wire_names
from paceline.planner.prediction import exchanges, predict, score_plan, step_times
from paceline.planner.workload import Affine, Workload
from plan.made import made_cluster, made_workload


def end(cuts: list[tuple[int, int]], ready: list[float], cost: np.ndarray) -> float:
    last = [ready[stop - 1] for _, stop in cuts]
    return exchanges(last, [float(cost[i, j]) for i, j in cuts])[-1].end_s


def all_cuts(count: int) -> list[list[tuple[int, int]]]:
    found = []
    for inner in itertools.product([False, True], repeat=count - 1):
        stops = [i + 1 for i, cut in enumerate(inner) if cut] + [count]
        found.append(list(zip([0, *stops[:-1]], stops, strict=True)))
    return found


def table(sizes: list[float], a: float, b: float) -> np.ndarray:
    before = np.cumsum([0, *sizes])
    return a + b * (before[None, :] - before[:, None])


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 10)), min_size=1, max_size=7),
    st.floats(0, 0.5), st.floats(0, 0.2),
)  # fmt: skip
def test_no_cuts_end_sooner(rows: list[tuple[float, float]], a: float, b: float) -> None:
    ready = sorted(r for r, _ in rows)
    cost = table([s for _, s in rows], a, b)
    best = end(optimal_cuts(ready, cost), ready, cost)
    least = min(end(cuts, ready, cost) for cuts in all_cuts(len(rows)))
    assert best == pytest.approx(least, rel=1e-9, abs=1e-12)


def test_what_backward_hides_anyway_travels_together() -> None:
    work = made_workload((10, 10, 10, 10), ready=(0.1, 0.2, 0.3, 1.0))
    plan = best_plan(work, made_cluster(), 64)
    assert [len(bucket.tensors) for bucket in plan.buckets] == [3, 1]


BOTH = ("auto", "float16")
HELD = ("auto", "float32", "float16", "bfloat16")


def slow(cast_s: float = 1e-10, nodes: int = 4) -> Cluster:
    return Cluster(nodes, 1, Link(0, 0), Link(1e-5, 1e-9), cast_s=cast_s)


def step_s(work: Workload, cluster: Cluster, plan: FusionPlan) -> float:
    return step_times(work, cluster, plan, 8)[0].overlapped()


def all_plans(work: Workload, wires: tuple[str, ...], names: tuple[str, ...]) -> list[FusionPlan]:
    tensors = [g.name for g in work.gradients]
    found = []
    for inner in itertools.product([False, True], repeat=len(tensors) - 1):
        stops = [i + 1 for i, cut in enumerate(inner) if cut] + [len(tensors)]
        runs = list(zip([0, *stops[:-1]], stops, strict=True))
        ways = list(itertools.product(wires, names, names))
        for chosen in itertools.product(ways, repeat=len(runs)):
            found.append(FusionPlan(tuple(
                FusionBucket(tuple(tensors[i:j]), algorithm, wire, beside)
                for (i, j), (wire, algorithm, beside) in zip(runs, chosen, strict=True)
            )))  # fmt: skip
    return found


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3_000_000), st.booleans()), min_size=1, max_size=3),
    st.floats(1e-6, 1e-3), st.floats(1e-10, 1e-8), st.floats(0, 1e-8),
)  # fmt: skip
def test_no_plan_of_all_there_are_ends_sooner(
    rows: list[tuple[int, bool]], alpha: float, beta: float, cast_s: float
) -> None:
    work = made_workload(tuple(size for size, _ in rows))
    held = tuple(replace(g, half=h) for g, (_, h) in zip(work.gradients, rows, strict=True))
    work = replace(work, gradients=held)
    cluster = Cluster(3, 2, Link(alpha / 3, beta / 5), Link(alpha, beta), cast_s=cast_s)
    names, wires = ("ring", "tree"), ("auto", "float32", "bfloat16")
    best = step_s(work, cluster, best_plan(work, cluster, 8, names, wires))
    least = min(step_s(work, cluster, plan) for plan in all_plans(work, wires, names))
    assert best == pytest.approx(least, rel=1e-9)


def test_only_what_is_exposed_is_rounded() -> None:
    """The first bucket's exchange is over before the last gradient is ready, in 32 bits as well."""
    work = made_workload((100_000, 4_000_000), ready=(0.1, 1.0))
    plan = best_plan(work, slow(), 64, wires=BOTH)
    assert [bucket.wire for bucket in plan.buckets] == ["auto", "float16"]
    assert best_plan(work, slow(), 64).buckets[-1].wire == "auto"
    exact = best_plan(work, slow(), 64, wires=("auto",))
    assert step_s(work, slow(), plan) < 0.7 * step_s(work, slow(), exact)
    # Neither where a cast costs more than it saves, nor what is held in 16 bits already.
    for other, cluster in (
        (work, slow(cast_s=1e-7)),
        (made_workload((100_000, 4_000_000), half=True), slow()),
    ):
        found = best_plan(other, cluster, 64, wires=HELD if other is not work else BOTH)
        assert {bucket.wire for bucket in found.buckets} == {"auto"}
    with pytest.raises(ConfigError, match="did you mean 'float16'"):
        wire_names(["flaot16"])
    assert wire_names(["bf16", "fp32", "auto", "float32"]) == ("auto", "float32", "bfloat16")


def test_the_command_chooses_among_the_formats_that_it_is_given(tmp_path: Path) -> None:
    profile, out = tmp_path / "profile.toml", tmp_path / "plan.toml"
    work = made_workload((100_000, 4_000_000), ready=(0.1, 1.0))
    PlanFile(workload=work.to_section()).write(profile)
    flags = ["plan", "--profile", str(profile), "--nodes", "4", "--gpus-per-node", "1",
             "--node-gbps", "10", "-b", "64", "--plan-out", str(out)]  # fmt: skip
    for wires, wanted in (
        ((), ["auto"]), (("--wire", "fp16"), ["float16"]),
        (("--wire", "fp16", "--wire", "auto"), ["auto", "float16"]),
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*flags, *wires], catch_exceptions=False)
        assert done.exit_code == 0
        found = [bucket.wire for bucket in PlanFile.read(out).plan.buckets]
        assert list(dict.fromkeys(found)) == wanted
        assert ("float16" in done.output) == ("float16" in wanted)


def test_signals_ride_in_fp32_or_follow() -> None:
    """As the communication module sends them (tests/comm/test_messages.py)."""
    assert signal_bytes(2) == 4 * (len(SIGNALS) + 2)
    work, cluster = made_workload((1000, 1000)), made_cluster(4, 1, launch_s=1.0)
    names = tuple(g.name for g in work.gradients)
    for wire, messages in (("auto", 1), ("float32", 1), ("float16", 2)):
        plan = FusionPlan((FusionBucket(names, "ring", wire),))
        (score,) = score_plan(plan, work, cluster, 1)
        assert int(score.cost_s) == messages, wire
    halves = made_workload((1000, 1000), half=True)
    (score,) = score_plan(FusionPlan((FusionBucket(names, "ring"),)), halves, cluster, 1)
    assert int(score.cost_s) == 2
    apart = FusionPlan(tuple(FusionBucket((name,), "ring") for name in names))
    assert [int(s.cost_s) for s in score_plan(apart, work, cluster, 1)] == [1, 1]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4_000_000), st.floats(0, 1)), min_size=2, max_size=6),
    st.integers(1, 256), st.floats(0, 1e-9),
)  # fmt: skip
def test_no_bucket_could_be_more_exact_and_no_two_could_be_one(
    rows: list[tuple[int, float]], batch: int, cast_s: float
) -> None:
    work = made_workload(tuple(size for size, _ in rows), tuple(sorted(at for _, at in rows)))
    cluster = slow(cast_s)

    def last_end_s(plan: FusionPlan) -> float:
        scores = score_plan(plan, work, cluster, batch)
        return exchanges([s.ready_s for s in scores], [s.cost_s for s in scores])[-1].end_s

    plan = best_plan(work, cluster, batch, ("ring",), BOTH, spread=0.0)
    end = last_end_s(plan) * (1 + 1e-9)
    for at, bucket in enumerate(plan.buckets):
        before, behind = plan.buckets[:at], plan.buckets[at + 1 :]
        if bucket.wire == "float16":
            exact = replace(bucket, wire="auto")
            assert last_end_s(FusionPlan((*before, exact, *behind))) > end
        if behind and bucket.wire == behind[0].wire == "auto":
            both = replace(bucket, tensors=bucket.tensors + behind[0].tensors)
            assert last_end_s(FusionPlan((*before, both, *behind[1:]))) > end


def workload(half: list[int], full: list[int]) -> Workload:
    """All ready at once, so that one bucket is best."""
    sizes = [(n, True) for n in half] + [(n, False) for n in full]
    gradients = tuple(Gradient(f"t{i}", n, h, 0.0) for i, (n, h) in enumerate(sizes))
    return Workload("made", gradients, Affine(1e-3, 0), Affine(1e-3, 0), 0.0)


def meeting_at(size: float) -> Cluster:
    """Returns eight ranks on which tree and ring cost the same for `size` bytes."""
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


def test_fewer_buckets_by_brute_force() -> None:
    draw = np.random.default_rng(0)
    count = 6
    for _ in range(40):
        ready = np.sort(draw.random(count)).tolist()
        before = np.concatenate([[0.0], draw.random(count).cumsum()])
        cost = np.maximum(before[None, :] - before[:, None], 0) * 0.3 + 0.05
        for most in (1, 2, 3, count):
            found = limited_cuts(ready, cost, most)
            assert len(found) <= most
            best = min(end(cuts, ready, cost) for cuts in all_cuts(count) if len(cuts) <= most)
            assert end(found, ready, cost) == pytest.approx(best)


def test_hidden_exchanges_that_cost_compute_are_sent_in_fewer_buckets() -> None:
    """Latency of every bucket slows the backward pass, so that the plan which ends first is not best."""
    work = made_workload((1_000_000,) * 8, ready=tuple((n + 1) / 8 for n in range(8)))
    free = Cluster(64, 1, Link(1e-5, 1e-12), Link(1e-4, 1e-11))
    costly = replace(free, hidden_cost=0.5)
    first, fewer = (best_plan(work, place, 64, ("ring",)) for place in (free, costly))
    assert len(fewer.buckets) < len(first.buckets)
    steps = [predict(work, costly, plan, 64).step_s for plan in (first, fewer)]
    assert steps[1] < steps[0]
