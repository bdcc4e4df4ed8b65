"""The verdict and the rows that the command line prints."""

from pathlib import Path

import pytest

from paceline.core.events import StopEvent
from paceline.report.run_files import RunFiles
from paceline.report.run_page import summary_rows, verdict
from report.conftest import MakeRun
from report.made_up_runs import SUMMARY, evaluation, start, step


def test_rows_of_a_finished_run(finished_run: Path) -> None:
    rows = summary_rows(RunFiles.read(finished_run))
    assert rows[0] == ("run", "quickstart")
    assert ("top-1", "90.31 %") in rows
    assert ("stopped by", "finished") in rows


def test_verdict_of_a_finished_run(finished_run: Path) -> None:
    assert verdict(RunFiles.read(finished_run)) == (
        "quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"stopped_by": "target", "world_size": 2},
            "quickstart: target reached, 90.3 % top-1 in 101 s, 1,430 images/s on 2 ranks",
        ),
        (
            {"stopped_by": "signal", "steps": 200},
            "quickstart: stopped by signal at step 200 of 800 (25 %); "
            "so far 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank",
        ),
        ({"top1": None}, "quickstart: 101 s, 1,430 images/s on 1 rank"),
        (
            {"top1": None, "train_s": None, "images_per_s": None, "steps": 0},
            "quickstart: finished without an evaluation",
        ),
    ],
)
def test_verdict_by_summary(make_run: MakeRun, change: dict[str, object], text: str) -> None:
    folder = make_run([start()], summary={**SUMMARY, **change})
    assert verdict(RunFiles.read(folder)) == text


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([], "run: unfinished, no step recorded yet"),
        ([start()], "run: unfinished, no step recorded yet"),
        (
            [start(), step(1), step(2)],
            "run: unfinished, at step 2 of 800 (0 %); so far 0.2 s, 1,430 images/s on 1 rank",
        ),
        (
            [start(total_steps=4), step(1), step(2), evaluation(2, 55.55)],
            "run: unfinished, at step 2 of 4 (50 %); "
            "so far 55.5 % top-1 in 0.3 s, 1,430 images/s on 1 rank",
        ),
        (
            [start(total_steps=4), step(1), StopEvent(1, "signal")],
            "run: stopped by signal at step 1 of 4 (25 %); so far 0.2 s, 1,430 images/s on 1 rank",
        ),
        ([step(1)], "run: unfinished, at step 1; so far 1,430 images/s"),
    ],
)
def test_verdict_by_records(make_run: MakeRun, events: list[object], text: str) -> None:
    assert verdict(RunFiles.read(make_run(events))) == text


def test_no_escape_sequence_reaches_the_terminal(make_run: MakeRun) -> None:
    hostile = "\x1b[2J\nrm"
    folder = make_run([start()], summary={**SUMMARY, "recipe": hostile, "stopped_by": hostile})
    run = RunFiles.read(folder)
    for text in (verdict(run), *(cell for row in summary_rows(run) for cell in row)):
        assert text.isprintable()
