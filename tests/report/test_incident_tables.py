"""Resumes, skipped steps, corrupt samples, checkpoints, ranks and remarks as rows."""

import math
from pathlib import Path

from paceline.core.events import CheckpointEvent, CorruptEvent, NoteEvent
from paceline.report.run_files import RunFiles
from paceline.report.run_page import (
    checkpoint_table,
    corrupt_table,
    notes,
    rank_table,
    resume_table,
    skipped_table,
)
from report.conftest import MakeRun
from report.made_up_runs import start, step


def test_nothing_happened(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run([start(), step(1)]))
    for table in (corrupt_table, checkpoint_table, skipped_table, resume_table, rank_table):
        assert table(run).rows == ()
    assert notes(run) == []


def test_corrupt_samples_of_all_ranks_each_once(make_run: MakeRun) -> None:
    on_0 = [start(), CorruptEvent(9, "b.png", "truncated"), CorruptEvent(20, "b.png", "truncated")]
    on_1 = [start(), CorruptEvent(3, "a.png", "no image"), CorruptEvent(5, "b.png", "cut short")]
    table = corrupt_table(RunFiles.read(make_run(on_0, ranks={1: on_1})))
    assert table.rows == (
        ("a.png", "no image", "3", "1"),
        ("b.png", "cut short", "5", "1"),
    )


def test_corrupt_samples_met_again_after_a_resume_count_once(make_run: MakeRun) -> None:
    events = [start(), CorruptEvent(9, "b", "bad"), start(5), CorruptEvent(9, "b", "bad")]
    assert corrupt_table(RunFiles.read(make_run(events))).rows == (("b", "bad", "9", "0"),)


def test_checkpoints_the_latest_first_and_not_all(make_run: MakeRun) -> None:
    events = [start(), *(CheckpointEvent(n, f"c{n}.pt", 0.5, best=n == 29) for n in range(1, 31))]
    table = checkpoint_table(RunFiles.read(make_run(events)))
    assert table.rows[:2] == (
        ("c30.pt", "30", "0.5 s", ""),
        ("c29.pt", "29", "0.5 s", "best so far"),
    )
    assert len(table.rows) == 12
    assert table.note == "18 more not shown"


def test_skipped_steps(make_run: MakeRun) -> None:
    events = [start(), step(1), step(1200, math.nan, skipped=True)]
    assert skipped_table(RunFiles.read(make_run(events))).rows == (("1,200", "12", "–"),)


def test_resumes(make_run: MakeRun) -> None:
    events = [start(), step(1), start(1, resumed_from="checkpoints/step-1.pt", world_size=2)]
    assert resume_table(RunFiles.read(make_run(events))).rows == (
        ("2025-11-15 07:00 UTC", "1", "checkpoints/step-1.pt", "2 ranks"),
    )


def test_ranks_side_by_side(make_run: MakeRun) -> None:
    slow = [start(), *(step(n, step_s=0.2, data_s=0.1) for n in range(1, 4))]
    table = rank_table(RunFiles.read(make_run([start(), step(1)], ranks={1: slow})))
    assert table.rows == (("0", "1", "0.084 s", "0.002 s"), ("1", "3", "0.2 s", "0.1 s"))


def test_a_rank_that_recorded_no_step_has_no_row(make_run: MakeRun) -> None:
    folder: Path = make_run([start(), step(1)], ranks={1: [start()]})
    assert rank_table(RunFiles.read(folder)).rows == ()


def test_remarks_each_once(make_run: MakeRun) -> None:
    events = [NoteEvent("a"), NoteEvent("b"), start(), NoteEvent("a")]
    assert notes(RunFiles.read(make_run(events))) == ["a", "b"]
