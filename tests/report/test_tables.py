"""Result, evaluations, configuration and environment as rows."""

import math
from pathlib import Path

from paceline.core.events import CorruptEvent
from paceline.report.run_files import RunFiles
from paceline.report.tables import (
    MAX_ROWS,
    Table,
    configuration_tables,
    environment_tables,
    epoch_table,
    result_rows,
)
from report.conftest import MakeRun
from report.made_up_runs import SUMMARY, evaluation, start, step


def test_result_of_a_finished_run(finished_run: Path) -> None:
    assert result_rows(RunFiles.read(finished_run)) == [
        ("top-1", "90.31 %"),
        ("top-5", "99.72 %"),
        ("images/s", "1,430"),
        ("training time", "101 s"),
        ("epochs", "8"),
        ("steps", "800"),
        ("global batch", "120"),
        ("ranks", "1"),
        ("stopped by", "finished"),
    ]


def test_result_tells_what_is_out_of_the_ordinary(make_run: MakeRun) -> None:
    events = [
        start(),
        step(1),
        CorruptEvent(1, "a", "bad"),
        evaluation(1, 95.0),
        start(1),
        step(2, math.nan, skipped=True),
    ]
    summary = {
        **SUMMARY,
        "steps": 2,
        "time_to_target_s": 88.0,
        "stopped_by": "target",
        "corrupt_samples": 8,
        "input_counters": {"read_retries": 1200, "cache_hits": 5, "cache_damaged": 2},
    }
    rows = dict(result_rows(RunFiles.read(make_run(events, summary=summary))))
    assert rows["best top-1"] == "95.00 %"
    assert rows["time to target"] == "88 s"
    assert rows["steps"] == "2 of 800"
    assert rows["corrupt training images"] == "8"
    assert rows["reads that were repeated"] == "1,200"
    assert rows["damaged samples in the cache"] == "2"
    assert rows["skipped steps"] == "1"
    assert rows["steps without a finite loss"] == "1"
    assert rows["resumes"] == "1"
    assert list(rows)[:3] == ["top-1", "best top-1", "top-5"]


def test_result_of_an_empty_run(make_run: MakeRun) -> None:
    rows = dict(result_rows(RunFiles.read(make_run([]))))
    assert rows["top-1"] == "–"
    assert rows["steps"] == "0"
    assert rows["stopped by"] == "not ended"


def test_evaluations_carry_the_training_since_the_one_before(make_run: MakeRun) -> None:
    events = [start()]
    events += [step(n, float(n), images_per_s=1000.0 + n) for n in range(1, 4)]
    events += [evaluation(3, 70.0)]
    events += [step(n, float(n), images_per_s=1000.0 + n) for n in range(4, 9)]
    events += [evaluation(8, 75.0, loss=math.nan)]
    table = epoch_table(RunFiles.read(make_run(events)))
    records = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [record["step"] for record in records] == ["8", "3"], "the latest first"
    assert [record["top-1"] for record in records] == ["75.00 %", "70.00 %"]
    assert [record["training loss"] for record in records] == ["6.0000", "2.0000"]
    assert [record["validation loss"] for record in records] == ["–", "0.5000"]
    assert [record["images/s"] for record in records] == ["1,006", "1,002"]
    assert records[0]["learning rate"] == "0.03199"


def test_an_evaluation_without_training_before_it(make_run: MakeRun) -> None:
    (row,) = epoch_table(RunFiles.read(make_run([start(), evaluation(0, 10.0)]))).rows
    assert row[:3] == ("0", "0", "10.00 %")
    assert row[5] == row[6] == row[7] == "–"


def test_an_endless_table_is_cut_and_says_so() -> None:
    rows = [(str(n),) for n in range(MAX_ROWS + 1234)]
    table = Table.of("Steps", ("step",), rows, set())
    assert len(table.rows) == MAX_ROWS
    assert table.note == "1,234 more not shown"
    assert Table.of("Steps", ("step",), rows[:MAX_ROWS], set()).note == ""


def test_configuration_by_section(make_run: MakeRun) -> None:
    config = {"version": 1, "optim": {"lr": 0.4, "milestones": [3, 6], "warmup": {"epochs": 2}}}
    first, second = configuration_tables(RunFiles.read(make_run([], config=config)))
    assert (first.title, first.rows) == ("general", (("version", "1"),))
    assert second.title == "optim"
    assert second.rows == (("lr", "0.4"), ("milestones", "3, 6"), ("warmup.epochs", "2"))


def test_no_configuration_gives_no_table(make_run: MakeRun) -> None:
    assert configuration_tables(RunFiles.read(make_run([], config=None))) == []


def test_environment(finished_run: Path) -> None:
    versions, hardware, chosen = environment_tables(RunFiles.read(finished_run))
    assert ("torch", "2.13.0+cpu") in versions.rows
    assert hardware.rows == (("cpu", "2 cores"), ("gpus", "(none)"))
    assert chosen.rows == (("comm.backend", "none"),)


def test_environment_of_an_odd_summary_is_left_out(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([], summary={"versions": "2.13", "hardware": {}}))
    assert environment_tables(run) == []
