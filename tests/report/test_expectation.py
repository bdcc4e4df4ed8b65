from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.plan.optimizer import best_plan
from paceline.plan.plan_file import ClusterFacts, Expected, ModelFacts, PlanFile
from paceline.plan.prediction import predict
from paceline.report.expectation import bound_by, expectation_table, traced_buffers
from paceline.report.run_files import RunFiles
from paceline.report.run_page import summary_rows
from plan.made import made_cluster, made_workload


def write_run(
    path: Path, *, step_s: float = 0.1, data_s: float = 0.0, waits: Any = (0.0, 0.0)
) -> Path:
    """Records of two ranks, and the plan of a planner."""
    path.mkdir()
    (path / "config.toml").write_text("")
    for rank, wait in enumerate(waits):
        rows: list[dict[str, Any]] = [
            {"event": "start", "step": 0, "total_steps": 10, "world_size": len(waits), "time": 1.0}
        ]
        rows += [
            {"event": "step", "step": n + 1, "step_s": step_s, "data_s": data_s, "loss": 1.0,
             "exposed_comm_s": wait, "time": 2.0 + n}
            for n in range(10)
        ]  # fmt: skip
        name = "metrics.jsonl" if rank == 0 else f"metrics.rank{rank}.jsonl"
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    work, cluster = made_workload(), made_cluster(2, 1)
    plan = best_plan(work, cluster, 16)
    model = ModelFacts.of((g.name, g.elements) for g in work.gradients)
    expected = Expected.of(predict(work, cluster, plan, 16))
    PlanFile(plan, model, ClusterFacts(2, 2), expected).write(path / "plan.toml")
    return path


def write_trace(path: Path) -> None:
    """Two steps of two ranks; rank 1 begins 3 ms late, and the exchange itself takes 4 ms."""
    events = [
        {"ph": "X", "cat": "exchange", "pid": rank, "ts": 1e6 * step + 3e3 * rank,
         "dur": 7e3 - 3e3 * rank, "args": {"step": step, "buffer": 0}}
        for step in (1, 2) for rank in (0, 1)
    ]  # fmt: skip
    events.append(
        {"ph": "i", "cat": "exchange", "pid": 0, "ts": 0.0, "args": {"step": 1, "buffer": 0}}
    )
    (path / "trace.json").write_text(json.dumps({"traceEvents": events}))


def test_side_by_side_buffer_by_buffer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", waits=(0.03, 0.03))
    write_trace(run)
    rows = {row[0]: row for row in expectation_table(RunFiles.read(run)).rows}
    assert rows["step"][2] == "100.00"
    assert rows["compute"][2] == "70.00"
    assert rows["exposed communication"][2] == "30.00"
    assert rows["buffer 1"][2] == "4.00"
    assert any(label == "buffer 1, predicted" for label, _ in summary_rows(RunFiles.read(run)))


def test_a_loaded_host_is_no_slow_compute(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", waits=(0.05, 0.0))
    for rank, share in ((0, 0.1), (1, 0.62)):
        path = run / ("metrics.rank1.jsonl" if rank else "metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows[0]["hardware"] = {"device": "cpu"}
        for row in rows[3:]:
            row["core_wait_share"] = share
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bound_by(RunFiles.read(run))
    assert found is not None
    assert found.startswith("an overloaded host: rank 1's threads waited for cores 62%")
    assert "run.threads=1" in found
    # Where a GPU computes and never waits for its input, the host's threads do not matter.
    for path in run.glob("metrics*.jsonl"):
        path.write_text(path.read_text().replace('"cpu"', '"cuda:0"'))
    assert str(bound_by(RunFiles.read(run))).startswith("straggler")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "compute"),
        ({"waits": (0.03, 0.03)}, "exposed communication, 30% of a step"),
        ({"data_s": 0.04}, "input, 40% of a step"),
        ({"waits": (0.05, 0.0)}, "straggler rank 1"),
    ],
)
def test_the_verdict(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    found = bound_by(RunFiles.read(write_run(tmp_path / "run", **values)))
    assert found is not None
    assert found.startswith(words)


def test_what_the_host_waited_beside_a_busy_device_is_no_input(tmp_path: Path) -> None:
    """The host waited for 60 ms of a step of 100, the device for 2 of them."""
    path = write_run(tmp_path / "run", data_s=0.06)
    for file in path.glob("metrics*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            if record["event"] == "step":
                record |= {"input_stall_s": 0.002, "input_stall_causes": {"decode": 0.002}}
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    run = RunFiles.read(path)
    rows = {row[0]: row for row in expectation_table(run).rows}
    assert (rows["input"][2], rows["compute"][2]) == ("2.00", "98.00")
    assert bound_by(run) == "compute"


def test_a_plan_without_a_planner_expects_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    made = PlanFile.read(run / "plan.toml")
    PlanFile(made.plan, made.model, made.cluster).write(run / "plan.toml")
    assert not expectation_table(RunFiles.read(run)).rows
    (run / "plan.toml").unlink()
    assert not expectation_table(RunFiles.read(run)).rows


def test_a_broken_trace_is_none(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[1]")
    assert traced_buffers(tmp_path / "trace.json") == {}
    assert traced_buffers(tmp_path / "no.json") == {}


def test_an_expectation_survives_the_file(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    made = PlanFile.read(run / "plan.toml")
    assert made.expected is not None
    assert len(made.expected.buffers_s) == len(made.plan.buffers)
    assert Expected.from_table({"step_s": 1}) is None
    assert Expected.from_table({**made.expected.to_table(), "step_s": "x"}) is None
