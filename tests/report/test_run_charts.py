"""The charts of a run: which lines, on which axis, with which markers."""

import math
from pathlib import Path

from paceline.report.chart import Chart
from paceline.report.run_charts import run_charts
from paceline.report.run_files import RunFiles
from report.conftest import MakeRun
from report.made_up_runs import evaluation, start, step


def charts_of(folder: Path) -> dict[str, Chart]:
    return {chart.title.split()[0]: chart for chart in run_charts(RunFiles.read(folder))}


def names(chart: Chart) -> list[str]:
    return [line.name for line in chart.lines]


def test_a_finished_run_has_four_charts_on_one_axis(finished_run: Path) -> None:
    charts = charts_of(finished_run)
    assert list(charts) == ["Accuracy", "Loss", "Learning", "Throughput"]
    assert {chart.x_range for chart in charts.values()} == {(0.0, 8.0)}
    assert {chart.x_label for chart in charts.values()} == {"epoch"}
    assert names(charts["Accuracy"]) == ["top-1", "top-5"]
    assert names(charts["Loss"]) == ["training", "single steps", "validation"]
    assert names(charts["Throughput"]) == ["images/s", "single steps"]
    assert charts["Throughput"].from_zero
    assert charts["Loss"].note == "median of 33 steps"
    assert not charts["Loss"].log


def test_points_are_the_runs_own(finished_run: Path) -> None:
    accuracy = charts_of(finished_run)["Accuracy"].lines[0].points
    assert [x for x, _ in accuracy] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert round(accuracy[0][1], 2) == round(90.5 - 30 * math.exp(-100 / 180), 2)


def test_less_than_an_epoch_is_told_in_steps_and_needs_no_smoothing(make_run: MakeRun) -> None:
    charts = charts_of(make_run([start(), *(step(n, 1.0) for n in range(1, 21))]))
    assert charts["Loss"].x_label == "step"
    assert charts["Loss"].x_range == (0.0, 20.0)
    assert charts["Loss"].note == ""
    assert names(charts["Loss"]) == ["training", "validation"]
    assert [x for x, _ in charts["Loss"].lines[0].points] == list(range(1, 21))


def test_a_run_without_steps_has_empty_charts(make_run: MakeRun) -> None:
    for chart in charts_of(make_run([])).values():
        assert all(not line.points for line in chart.lines)
        assert chart.x_range == (0.0, 1.0)


def test_a_spike_makes_the_loss_logarithmic(make_run: MakeRun) -> None:
    events = [start(), *(step(n, 500.0 if n == 9 else 1.0) for n in range(1, 31))]
    assert charts_of(make_run(events))["Loss"].log
    with_nought = [*events, step(31, 0.0)]
    assert not charts_of(make_run(with_nought, name="nought"))["Loss"].log


def test_resumes_and_skipped_steps_are_marked(make_run: MakeRun) -> None:
    events = [
        start(),
        *(step(n) for n in range(1, 101)),
        step(101, math.nan, skipped=True),
        start(100, resumed_from="a"),
        step(101, math.nan, skipped=True),
        *(step(n) for n in range(102, 201)),
        evaluation(200),
    ]
    charts = charts_of(make_run(events))
    assert [(m.kind, m.x, m.text) for m in charts["Loss"].markers] == [
        ("resume", 1.0, "resumed at step 100"),
        ("skip", 1.01, "step 101 skipped"),
    ]
    assert [m.kind for m in charts["Accuracy"].markers] == ["resume"]


def test_a_resume_before_any_step_stands_at_the_start(make_run: MakeRun) -> None:
    events = [start(50, resumed_from="elsewhere"), *(step(n) for n in range(51, 201))]
    assert [m.x for m in charts_of(make_run(events))["Loss"].markers] == [0.0]


def test_a_resume_beyond_what_is_recorded_is_not_drawn(make_run: MakeRun) -> None:
    events = [start(), *(step(n) for n in range(1, 10)), start(500, resumed_from="a")]
    assert list(charts_of(make_run(events))["Loss"].markers) == []


def test_very_many_skips_are_thinned(make_run: MakeRun) -> None:
    events = [start(), *(step(n, math.nan, skipped=True) for n in range(1, 2001))]
    assert len(charts_of(make_run(events))["Loss"].markers) == 200


def test_very_many_steps_are_thinned(make_run: MakeRun) -> None:
    events = [start(), *(step(n, 2.0, total=5000) for n in range(1, 5001))]
    for chart in charts_of(make_run(events)).values():
        assert all(len(line.points) <= 600 for line in chart.lines)
