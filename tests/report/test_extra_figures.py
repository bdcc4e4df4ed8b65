"""Figures that an extension declares: in the table of a run, before and after its end, and as charts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.report import RunFiles, summary_rows
from paceline.report.curves import run_charts
from paceline.report.outcome import ExtraFigure
from report.conftest import MakeRun
from report.made_up_runs import SUMMARY, evaluation, start

SHOWN = [
    {"part": "fan", "name": "air_s", "label": "air time", "unit": "duration", "column": "air",
     "axis": "minutes of air"},
    {"part": "fan", "name": "images_per_s", "label": "air's images/s", "unit": "rate"},
]  # fmt: skip
EVENTS = [start(shown=SHOWN), evaluation(100, fields={"air_s": 60.0}),
          evaluation(200, fields={"air_s": 120.0})]  # fmt: skip


def figures(run: RunFiles) -> dict[str, float | None]:
    return {own.name: own.value for own in ExtraFigure.of(run)}


def test_before_the_end_they_are_those_of_the_latest_evaluation(make_run: MakeRun) -> None:
    run = RunFiles.read(make_run(EVENTS))
    assert figures(run) == {"air_s": 120.0, "images_per_s": None}
    assert dict(summary_rows(run))["air time"] == "2 min 0 s"
    assert "Accuracy over the air time (%)" in {chart.title for chart in run_charts(run)}


def test_at_the_end_they_are_those_of_the_summary(make_run: MakeRun) -> None:
    """A field of the same name elsewhere is another one."""
    ended = {**SUMMARY, "fan": {"air_s": 180.0, "images_per_s": 7.0}}
    assert figures(RunFiles.read(make_run(EVENTS, summary=ended))) == {
        "air_s": 180.0, "images_per_s": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize("shown", [7, [7], [{"name": 7, "part": []}], {"name": "x"}])
def test_foreign_records_declare_nothing_that_breaks_a_page(make_run: MakeRun, shown: Any) -> None:
    run = RunFiles.read(make_run([start(shown=shown)], summary=SUMMARY))
    assert set(figures(run).values()) <= {None}
    assert summary_rows(run)
