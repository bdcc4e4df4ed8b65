"""The optimiser chooses the wire format: exact, never beaten, and rounding only where it pays."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.comm.exchange import SIGNALS
from paceline.core.errors import ConfigError
from paceline.plan import FusionBuffer, FusionPlan, PlanFile
from paceline.plan.choose_plan import best_plan, merged_plan, threshold_plan
from paceline.plan.cluster import Cluster, Link
from paceline.plan.plan_score import score_plan
from paceline.plan.prediction import step_times
from paceline.plan.scaling import Question, advise
from paceline.plan.wire_format import WIRES, signal_bytes, travelling, wire_names
from paceline.plan.workload import Workload
from plan.made import made_cluster, made_workload

BOTH = ("auto", "float16")


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
                FusionBuffer(tuple(tensors[i:j]), algorithm, wire, beside)
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


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 2_000_000), min_size=1, max_size=12), st.integers(1, 64),
    st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-8), st.floats(0, 1e-8), st.booleans(),
)  # fmt: skip
def test_no_baseline_in_any_allowed_format_is_better(
    sizes: list[int], nodes: int, alpha: float, beta: float, cast_s: float, half: bool
) -> None:
    work = made_workload(tuple(sizes), half=half)
    cluster = Cluster(nodes, 4, Link(alpha / 3, beta / 5), Link(alpha, beta), cast_s=cast_s)
    best = step_s(work, cluster, best_plan(work, cluster, 8, wires=WIRES))
    for wire in WIRES:
        for rival in (
            *(threshold_plan(work, cluster, 1 << power, ("ring",), wire) for power in (0, 16, 22)),
            merged_plan(work, cluster, 8, "ring", wire),
            best_plan(work, cluster, 8, wires=(wire,)),
        ):
            assert best <= step_s(work, cluster, rival) * (1 + 1e-9)


def test_only_what_is_exposed_is_rounded() -> None:
    """The first buffer's exchange is over before the last gradient is ready, in 32 bits as well."""
    work = made_workload((100_000, 4_000_000), ready=(0.1, 1.0))
    plan = best_plan(work, slow(), 64, wires=BOTH)
    assert [buffer.wire for buffer in plan.buffers] == ["auto", "float16"]
    assert best_plan(work, slow(), 64).buffers[-1].wire == "auto"
    exact = best_plan(work, slow(), 64, wires=("auto",))
    assert step_s(work, slow(), plan) < 0.7 * step_s(work, slow(), exact)


def test_a_cast_that_costs_more_than_it_saves_is_left_out() -> None:
    work = made_workload((100_000, 4_000_000), ready=(0.1, 1.0))
    plan = best_plan(work, slow(cast_s=1e-7), 64, wires=BOTH)
    assert {buffer.wire for buffer in plan.buffers} == {"auto"}


def test_half_precision_gradients_travel_as_they_are() -> None:
    work = made_workload((100_000, 4_000_000), half=True)
    plan = best_plan(work, slow(), 8, wires=WIRES)
    assert {buffer.wire for buffer in plan.buffers} == {"auto"}


def test_the_command_chooses_among_the_formats_that_it_is_given(tmp_path: Path) -> None:
    profile, out = tmp_path / "profile.toml", tmp_path / "plan.toml"
    made_workload((100_000, 4_000_000), ready=(0.1, 1.0)).write(profile)
    flags = ["plan", "--profile", str(profile), "--nodes", "4", "--gpus-per-node", "1",
             "--node-gbps", "10", "-b", "64", "--plan-out", str(out)]  # fmt: skip
    for wires, wanted in (
        ((), ["auto"]), (("--wire", "fp16"), ["float16"]),
        (("--wire", "fp16", "--wire", "auto"), ["auto", "float16"]),
    ):  # fmt: skip
        done = CliRunner().invoke(app, [*flags, *wires], catch_exceptions=False)
        assert done.exit_code == 0
        found = [buffer.wire for buffer in PlanFile.read(out).plan.buffers]
        assert list(dict.fromkeys(found)) == wanted
        assert ("float16" in done.output) == ("float16" in wanted)
        assert ("--wire fp16" in done.output) == (wanted == ["auto"])


def test_what_travels() -> None:
    assert [float(x) for x in travelling(10, 3, "auto")] == [20, 12, 0]
    assert [float(x) for x in travelling(10, 3, "float32")] == [40, 12, 10]
    assert [float(x) for x in travelling(10, 3, "bfloat16")] == [20, 6, 3]


def test_signals_ride_in_fp32_or_follow() -> None:
    """As the communication module sends them (tests/comm/test_messages.py)."""
    assert signal_bytes(2) == 4 * (len(SIGNALS) + 2)
    work, cluster = made_workload((1000, 1000)), made_cluster(4, 1, launch_s=1.0)
    names = tuple(g.name for g in work.gradients)
    for wire, messages in (("auto", 1), ("float32", 1), ("float16", 2)):
        plan = FusionPlan((FusionBuffer(names, "ring", wire),))
        (score,) = score_plan(plan, work, cluster, 1)
        assert int(score.cost_s) == messages, wire
    halves = made_workload((1000, 1000), half=True)
    (score,) = score_plan(FusionPlan((FusionBuffer(names, "ring"),)), halves, cluster, 1)
    assert int(score.cost_s) == 2
    apart = FusionPlan(tuple(FusionBuffer((name,), "ring") for name in names))
    assert [int(s.cost_s) for s in score_plan(apart, work, cluster, 1)] == [1, 1]


def test_rounding_is_advised_where_32_bits_travel_and_it_was_not_allowed() -> None:
    cluster = slow(nodes=8)
    for half, wires, expected in (
        (False, ("auto",), True), (False, BOTH, False), (True, ("auto",), False),
    ):  # fmt: skip
        ask = Question(made_workload((4_000_000,), half=half), 8, ("ring",), wires)
        advice = {a.change: a.gain for a in advise(ask, cluster, ask.answer(cluster))}
        rounding = [gain for change, gain in advice.items() if "16 bits" in change]
        assert bool(rounding) == expected
        assert not rounding or rounding[0] > 0.3


def test_names_of_formats() -> None:
    assert wire_names(["fp16", "auto", "float16"]) == ("auto", "float16")
    assert wire_names(["bf16", "fp32"]) == ("float32", "bfloat16")
    with pytest.raises(ConfigError, match="did you mean 'float16'"):
        wire_names(["flaot16"])
    with pytest.raises(ConfigError, match="none given"):
        best_plan(made_workload(), slow(), 8, wires=())
