"""Curves: picked, thinned and smoothed without losing their ends or their shape."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.report.run_files import (
    MAX_POINTS,
    Point,
    RunFiles,
    eval_points,
    median,
    moving_median,
    smoothing_window,
    step_points,
    thin,
)
from report.conftest import MakeRun
from report.made_up_runs import evaluation, start, step


def points(values: list[float]) -> list[Point]:
    return [Point(n, n / 100, value) for n, value in enumerate(values)]


def test_points_of_steps_and_evaluations(make_run: MakeRun) -> None:
    run = RunFiles.read(
        make_run([start(), step(1, 2.0), step(2, math.nan), step(3, 1.0), evaluation(3, 70.0)])
    )
    assert step_points(run, "loss") == [Point(1, 0.01, 2.0), Point(3, 0.03, 1.0)]
    assert [point.value for point in step_points(run, "images_per_s")] == [1430.0] * 3
    assert eval_points(run, "top1") == [Point(3, 0.03, 70.0)]
    assert eval_points(run, "nothing of the kind") == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_median_is_the_median(values: list[float]) -> None:
    assert median(values) == statistics.median(values)


def test_a_short_curve_is_left_alone() -> None:
    short = points([3.0, 1.0, 2.0])
    assert thin(short, 3) == short
    assert thin([], 3) == []


@pytest.mark.parametrize("length", [601, 999, 1199, 50_000])
def test_a_long_curve_keeps_its_ends_and_its_course(length: int) -> None:
    curve = points([float(n) for n in range(length)])
    thinned = thin(curve)
    assert len(thinned) == MAX_POINTS
    assert thinned[0] == curve[0]
    assert thinned[-1] == curve[-1]
    assert [p.step for p in thinned] == sorted({p.step for p in thinned})
    assert all(abs(p.value - p.step) <= length / MAX_POINTS for p in thinned)


def test_a_bucket_gives_its_median() -> None:
    curve = points([0.0, 1.0, 100.0, 3.0, 9.0])
    assert thin(curve, 3) == [curve[0], Point(2, 0.02, 3.0), curve[4]]


@pytest.mark.parametrize(
    ("length", "window"), [(0, 9), (40, 9), (400, 17), (2000, 81), (10**6, 501)]
)
def test_smoothing_window(length: int, window: int) -> None:
    assert smoothing_window(length) == window


def test_moving_median_passes_over_a_spike() -> None:
    assert [p.value for p in moving_median(points([1, 1, 1, 99, 1, 1, 1]), 3)] == [1] * 7


def test_moving_median_opens_at_the_start_and_takes_what_there_is_at_the_end() -> None:
    smooth = moving_median(points([9, 8, 7, 6, 5, 5, 1]), 5)
    assert [p.value for p in smooth] == [9, 8, 7, 6, 5, 5, 5]
    assert [p.step for p in smooth] == list(range(7))


def test_moving_median_equals_its_definition() -> None:
    noise = random.Random(3)
    values = [float(noise.randint(0, 9)) for _ in range(60)]
    half = 4
    expected = [
        statistics.median(values[max(0, i - half) : i + min(i, half) + 1]) for i in range(60)
    ]
    # While the window opens, it reaches as far to the left as to the right.
    assert [p.value for p in moving_median(points(values), 9)] == expected


def test_moving_median_of_nothing() -> None:
    assert moving_median([]) == []
