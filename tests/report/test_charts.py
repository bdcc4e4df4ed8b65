"""Charts: which lines, on which axes, with which markers; curves that keep their shape; SVG that is
safe."""

import math
import random
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report import RunFiles
from paceline.report.chart import (
    Axis,
    Chart,
    Line,
    Marker,
    line_chart,
)
from paceline.report.curves import moving_median, run_charts, thin
from paceline.report.run_files import Curve
from report.conftest import MakeRun
from report.made_up_runs import evaluation, start, step


def charts_of(folder: Path) -> dict[str, Chart]:
    return {chart.title.split()[0]: chart for chart in run_charts(RunFiles.read(folder))}


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=20))
def test_every_value_is_on_the_axis_and_labels_differ(values: list[float]) -> None:
    axis = Axis.fit(values)
    assert all(-1e-6 <= axis.fraction(value) <= 1 + 1e-6 for value in values)
    assert 2 <= len(axis.ticks) <= 13
    assert len(set(axis.labels())) == len(axis.ticks)


def test_a_logarithmic_axis_of_positive_values() -> None:
    axis = Axis.fit([0.2, 5000.0], log=True)
    assert axis.labels() == ["0.1", "1", "10", "100", "1,000", "10k"]
    assert [axis.fraction(value) for value in (0.1, 10, 10000)] == pytest.approx([0, 0.4, 1])
    assert len(Axis.fit([1e-12, 1e12], log=True).ticks) <= 7
    assert not Axis.fit([0.0, 10.0], log=True).log


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart(chart))


def titles(svg: ElementTree.Element, tag: str) -> list[str | None]:
    return [element.findtext("title") for element in svg.findall(tag)]


def test_a_sparse_line_has_dots_and_a_dense_one_hover_strips() -> None:
    chart = Chart(
        "Accuracy", "epoch", [Line("top-1", [(1, 80), (2, 90)])], show_value="{:.1f} %".format
    )
    assert titles(parsed(chart), "circle") == ["epoch 1: top-1 80.0 %", "epoch 2: top-1 90.0 %"]
    points = [(float(x), float(x)) for x in range(600)]
    svg = parsed(Chart("Loss", "step", [Line("a", points), Line("b", points, colour=2)]))
    assert svg.findall("circle") == []
    assert 0 < len(svg.findall("rect")) <= 75
    assert titles(svg, "rect")[0] == "step 0\na 7\nb 7"


def test_names_are_escaped() -> None:
    hostile = '</svg><script>"&'
    markers = [Marker(0, hostile), Marker(1, hostile, "skip")]
    text = line_chart(Chart(hostile, hostile, [Line(hostile, [(0, 1), (1, 2)])], markers=markers))
    assert "<script" not in text
    assert titles(ElementTree.fromstring(text), "path").count(hostile) == 2


def test_a_spike_makes_the_loss_logarithmic(make_run: MakeRun) -> None:
    events = [start(), *(step(n, 500.0 if n == 9 else 1.0) for n in range(1, 31))]
    assert charts_of(make_run(events))["Loss"].log
    assert not charts_of(make_run([*events, step(31, 0.0)], name="zero"))["Loss"].log


def test_resumes_and_skipped_steps_are_marked(make_run: MakeRun) -> None:
    events = [
        start(50, resumed_from="elsewhere"),
        *(step(n) for n in range(51, 101)),
        step(101, math.nan, skipped=True),
        start(100, resumed_from="a"),
        step(101, math.nan, skipped=True),
        *(step(n) for n in range(102, 201)),
        evaluation(200),
        start(500, resumed_from="beyond what is recorded"),
    ]
    charts = charts_of(make_run(events))
    assert [(m.kind, m.x) for m in charts["Loss"].markers] == [
        ("resume", 0.0), ("resume", 1.0), ("skip", 1.01)
    ]  # fmt: skip
    assert [m.kind for m in charts["Accuracy"].markers] == ["resume", "resume"]


def test_very_many_steps_and_skips_are_thinned(make_run: MakeRun) -> None:
    events = [start(), *(step(n, 2.0, total=3000, skipped=n % 2 == 0) for n in range(1, 3001))]
    charts = charts_of(make_run(events))
    assert all(len(line.points) <= 600 for chart in charts.values() for line in chart.lines)
    assert len(charts["Loss"].markers) <= 200


def curve_of(values: list[float]) -> Curve:
    steps = np.arange(len(values))
    return Curve(steps, steps / 100, np.array(values, float))


def points(curve: Curve) -> list[tuple[int, float, float]]:
    return list(zip(curve.step.tolist(), curve.epoch.tolist(), curve.value.tolist(), strict=True))


@pytest.mark.parametrize("length", [3, 600, 601, 999, 50_000])
def test_a_thinned_curve_keeps_its_ends_and_its_course(length: int) -> None:
    curve = curve_of([float(n) for n in range(length)])
    thinned, given = points(thin(curve)), points(curve)
    assert len(thinned) == min(length, 600)
    assert (thinned[0], thinned[-1]) == (given[0], given[-1])
    assert all(abs(value - step) <= length / 600 for step, _, value in thinned)
    spiked = curve_of([0.0, 1.0, 100.0, 3.0, 9.0])
    assert points(thin(spiked, 3)) == [(0, 0.0, 0.0), (2, 0.02, 3.0), (4, 0.04, 9.0)]


def test_moving_median_equals_its_definition() -> None:
    noise, half = random.Random(3), 4
    values = [float(noise.randint(0, 9)) for _ in range(60)]
    expected = [
        statistics.median(values[max(0, i - half) : i + min(i, half) + 1]) for i in range(60)
    ]
    # While the window grows, it reaches as far to the left as to the right.
    assert moving_median(np.array(values), 9).tolist() == expected
    assert moving_median(np.array([1.0, 1, 1, 99, 1, 1, 1]), 3).tolist() == [1] * 7
    assert len(moving_median(np.zeros(0))) == 0
