"""Bottlenecks of a step: stragglers, exposed communication, input stalls, loaded hosts; predictions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import ClusterFacts, ModelFacts, PlanFile
from paceline.planner.prediction import predict
from paceline.report import RunFiles, bound_by, summary_rows
from paceline.report.bottleneck import ExposedWaits, InputStall
from paceline.report.records import Records
from paceline.report.tables import expectation_table
from plan.made import made_cluster, made_workload
from report.html_reader import run_page
from report.made_up_runs import start, step, write_events


def run_of(waits: list[list[float]], world_size: int | None = None) -> RunFiles:
    """`waits`: for each rank the seconds of each step; steps take 0.084 s."""
    ranks = {
        rank: Records.of(
            event.to_dict()
            for event in [
                start(world_size=world_size or len(waits)),
                *(step(n, exposed_comm_s=wait) for n, wait in enumerate(of_rank, start=1)),
            ]
        )
        for rank, of_rank in enumerate(waits)
    }
    return RunFiles(Path("run"), ranks, None, {})


def rows_of(run: RunFiles) -> dict[str, str]:
    return dict(summary_rows(run))


def test_the_straggler_waits_least() -> None:
    slow, fast = [0.002] * 8 + [0.05], [0.030] * 8 + [0.01]
    run = run_of([fast, slow, fast])
    found = ExposedWaits.of(run).straggler()
    assert (found.rank, found.lost_s, found.share_last) == (1, pytest.approx(0.028), 8 / 9)
    assert rows_of(run)["straggler"].startswith("rank 1:")
    assert rows_of(run)["exposed communication"] == "2 ms a step (2 %)"


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param([[0.001, 0.03] * 5, [0.03, 0.001] * 5], id="they take turns"),
        pytest.param([[0.010] * 10, [0.011] * 10], id="always the same, by nothing"),
        pytest.param([[0.001] * 3, [0.05] * 3], id="too few steps"),
    ],
)
def test_no_straggler(waits: list[list[float]]) -> None:
    rows = rows_of(run_of(waits))
    assert "straggler" not in rows
    assert "exposed communication" in rows


def test_steps_that_not_all_ranks_recorded_name_nobody() -> None:
    waits = ExposedWaits.of(run_of([[0.1] * 7, [0.2] * 6]))
    assert waits.step[waits.complete].tolist() == list(range(1, 7))
    assert set(waits.last[waits.complete].tolist()) == {0}
    alone = ExposedWaits.of(run_of([[0.021] * 9], world_size=4))
    assert alone.exposed_s == 0.021
    assert alone.straggler() is None
    assert "exposed communication" not in rows_of(run_of([[0.0] * 9], world_size=1))


def stalled_run(path: Path, *stalls: dict[str, float]) -> RunFiles:
    """Steps of 100 ms with these input stalls; the first waits for the pipeline to fill."""
    events = [start(), step(1, step_s=0.1, input_stall_s=9.0, input_stall_causes={"read": 9.0})]
    events += [
        step(n, step_s=0.1, input_stall_s=sum(s.values()), input_stall_causes=s)
        for n, s in enumerate(stalls, start=2)
    ]
    path.mkdir()
    (path / "config.toml").write_text("")
    write_events(path / "metrics.jsonl", events)
    return RunFiles.read(path)


def edit_records(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for file in run.glob("metrics*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            change(record)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_bursts_count_by_their_mean_and_the_largest_cause_comes_first(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", {}, {}, {"read": 0.04, "decode": 0.12}, {})
    stall = InputStall.of(run)
    assert (stall.steps, list(stall.causes), stall.main_cause) == (4, ["decode", "read"], "decode")
    assert bound_by(run) == "input (decode), 40 % of a step"
    assert rows_of(run)["waiting for the input"] == "40 ms a step (40 %), most of it decode"
    rows = run_page(run.path).tables["Waiting for the input"]
    assert rows[1] == ("0", "decode", "30 ms", "30.0 %")


def test_a_stall_too_short_to_matter(tmp_path: Path) -> None:
    run = stalled_run(tmp_path / "run", {"copy": 0.001}, {"copy": 0.001})
    assert InputStall.of(run).main_cause == ""
    assert bound_by(run) == "compute"


def planned_run(
    path: Path, *, step_s: float = 0.1, data_s: float = 0.0, waits: Any = (0.0, 0.0)
) -> Path:
    """Records of two ranks, and a plan with the planner's prediction."""
    path.mkdir()
    (path / "config.toml").write_text("")
    for rank, wait in enumerate(waits):
        own = {"step_s": step_s, "data_s": data_s, "exposed_comm_s": wait}
        events = [start(world_size=len(waits)), *(step(n, **own) for n in range(1, 11))]
        name = "metrics.jsonl" if rank == 0 else f"metrics.rank{rank}.jsonl"
        write_events(path / name, events)
    work, cluster = made_workload(), made_cluster(2, 1)
    plan = best_plan(work, cluster, 16)
    model = ModelFacts.of((g.name, g.elements) for g in work.gradients)
    expected = predict(work, cluster, plan, 16).expected()
    PlanFile(plan, model, ClusterFacts(2, 2), expected).write(path / "plan.toml")
    return path


def test_predicted_and_measured_times(tmp_path: Path) -> None:
    path = planned_run(tmp_path / "run", waits=(0.03, 0.03))
    run = RunFiles.read(path)
    measured = {row[0]: row[2] for row in expectation_table(run).rows}
    assert measured == {
        "step": "100.00", "compute": "70.00", "exposed communication": "30.00", "input": "0.00",
    }  # fmt: skip
    assert "compute, predicted" in rows_of(run)
    made = PlanFile.read(path / "plan.toml")
    PlanFile(made.plan, made.model, made.cluster).write(path / "plan.toml")
    assert not expectation_table(RunFiles.read(path)).rows
    (path / "plan.toml").unlink()
    assert not expectation_table(RunFiles.read(path)).rows


def test_the_wait_of_a_host_beside_a_busy_device_is_not_input(tmp_path: Path) -> None:
    """The host waited for 60 ms of a step of 100, the device for 2 of them."""
    path = planned_run(tmp_path / "run", data_s=0.06)
    stall = {"input_stall_s": 0.002, "input_stall_causes": {"decode": 0.002}}
    edit_records(path, lambda record: record["event"] == "step" and record.update(stall))
    run = RunFiles.read(path)
    measured = {row[0]: row[2] for row in expectation_table(run).rows}
    assert (measured["input"], measured["compute"]) == ("2.00", "98.00")
    assert bound_by(run) == "compute"


def test_an_overloaded_host_comes_first_where_it_computes(tmp_path: Path) -> None:
    run = planned_run(tmp_path / "run", waits=(0.05, 0.0))
    edit_records(
        run, lambda record: record.update(core_wait_share=0.62, hardware={"device": "cpu"})
    )
    assert str(bound_by(RunFiles.read(run))).startswith("an overloaded host: rank 0's threads")
    assert "run.threads=1" in str(bound_by(RunFiles.read(run)))
    edit_records(run, lambda record: record.update(chosen={"threads": "1 (as in the checkpoint)"}))
    assert "run.threads" not in str(bound_by(RunFiles.read(run)))
    edit_records(run, lambda record: record.update(hardware={"device": "cuda:0"}))
    assert str(bound_by(RunFiles.read(run))).startswith("straggler")
