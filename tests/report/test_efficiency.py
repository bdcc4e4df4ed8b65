"""T = S · N · e: every second has one cause, and the largest loss is the one that was put in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.events import CheckpointEvent, Event, RanksEvent, StepEvent, StopEvent
from paceline.report import Efficiency, RunFiles, bound_by
from report.conftest import MakeRun
from report.html_reader import run_page
from report.made_up_runs import SUMMARY, evaluation, start

BATCH = 128
# Six different ways to spend a step of 100 ms: the field that is set, and the cause it is reported as.
STEP_S = 0.1


def steps(count: int, **fields: Any) -> list[StepEvent]:
    return [
        StepEvent(n, n / 100, 1.0, 0.1, BATCH / STEP_S, STEP_S, 0.0, **fields)
        for n in range(1, count + 1)
    ]


def efficiency(folder: Path) -> Efficiency:
    found = Efficiency.of(RunFiles.read(folder))
    assert found is not None
    return found


def finished(train_s: float, **more: Any) -> dict[str, Any]:
    return {**SUMMARY, "train_s": train_s, "world_size": more.get("world_size", 1)}


def test_the_shares_and_e_add_up_and_the_product_is_the_speed(make_run: MakeRun) -> None:
    events: list[Event] = [start(world_size=2)]
    mine = steps(20, exposed_comm_s=0.03, input_stall_s=0.01, input_stall_causes={"read": 0.01})
    mine[0] = replace(mine[0], step_s=0.5, images_per_s=BATCH / 0.5)
    mine[5] = replace(mine[5], skipped=True)
    events += [*mine, evaluation(20, eval_s=0.4), CheckpointEvent(20, "c", 0.9, stall_s=0.1)]
    others = steps(20, exposed_comm_s=0.01, input_stall_s=0.01)
    folder = make_run(
        [*events, StopEvent(20, "finished")], ranks={1: [start(world_size=2), *others]},
        summary=finished(4.0, world_size=2),
    )  # fmt: skip
    found = efficiency(folder)
    assert found.e + sum(found.lost.values()) == pytest.approx(1.0)
    assert found.alone * found.ranks * found.e == pytest.approx(found.total, rel=1e-6)
    lost = {cause: 4.0 * share for cause, share in found.lost.items()}
    assert lost["evaluation"] == pytest.approx(0.4)
    assert lost["saving"] == pytest.approx(0.1), "what was written in the background costs nothing"
    assert lost["exposed communication"] == pytest.approx(0.1 * 2.0)
    assert lost["waiting for the slowest rank"] == pytest.approx(0.2 * 2.0 / 2)
    assert lost["input"] == pytest.approx(0.1 * 2.0)
    assert lost["skipped steps"] == pytest.approx(0.05 * (1 - 0.1 - 0.1 - 0.1) * 2.0)
    # 0.4 s of the first step, and 4.0 - 2.4 - 0.4 - 0.1 s of which no record tells.
    assert lost["start-up and other"] == pytest.approx(0.4 + 1.1)


def many_ranks(
    ranks: int = 64, late_s: float = 0.0, wait_s: float = 0.0, **more: Any
) -> list[Event]:
    """Rank 0's records with the spread of all ranks; rank 17 is last by `late_s`."""
    events: list[Event] = [start(world_size=ranks, hardware={"device": "cpu"})]
    for event in steps(20, exposed_comm_s=wait_s + late_s, **more):
        spread = {"min": STEP_S, "median": STEP_S, "max": STEP_S, "rank": 0}
        exposed = {
            "min": wait_s, "median": wait_s + late_s, "max": wait_s + late_s, "rank": 17,
            "others": wait_s + late_s,
        }  # fmt: skip
        stall = dict.fromkeys(("min", "median", "max"), event.input_stall_s) | {"rank": 0}
        cores = dict.fromkeys(("min", "median", "max"), event.core_wait_share or 0.0) | {"rank": 3}
        events += [event, RanksEvent(event.step, ranks, spread, exposed, stall, cores)]
    return [*events, StopEvent(20, "finished")]


# What a user must read off the page: the verdict, and the largest part of the bar.
BOTTLENECKS = {
    "input": (
        many_ranks(input_stall_s=0.06, input_stall_causes={"decode": 0.06}, wait_s=0.002),
        "input (decode)", "input",
    ),
    "compute": (many_ranks(wait_s=0.001), "compute", ""),
    "communication": (many_ranks(wait_s=0.05), "exposed communication", "exposed communication"),
    "straggler": (
        many_ranks(late_s=0.04, wait_s=0.004), "straggler rank 17", "waiting for the slowest rank",
    ),
    "loaded host": (many_ranks(core_wait_share=0.4, wait_s=0.002), "an overloaded host", ""),
}  # fmt: skip


@pytest.mark.parametrize(("events", "verdict", "loss"), BOTTLENECKS.values(), ids=BOTTLENECKS)
def test_the_page_names_the_bottleneck(
    make_run: MakeRun, events: list[Event], verdict: str, loss: str
) -> None:
    folder = make_run(events, summary=finished(2.0, world_size=64))
    assert (bound_by(RunFiles.read(folder)) or "").startswith(verdict)
    found = efficiency(folder)
    if loss:
        assert found.largest_loss == loss
    else:
        assert found.e > 0.95
    text = run_page(folder).text
    assert "Steps are bound by" in text
    assert verdict in text


def test_virtual_ranks_have_none(make_run: MakeRun) -> None:
    folder = make_run([start(world_size=8, processes=1), *steps(20)])
    run = RunFiles.read(folder)
    assert Efficiency.of(run) is None
    assert "T = S" not in str(run_page(folder))
