"""The charts of a run: accuracy, loss, learning rate, throughput and more, thinned and smoothed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from paceline.core.units import count, format_percent, loss, rate
from paceline.report.bottleneck import ExposedWaits
from paceline.report.chart import SERIES_COLOURS, XY, Chart, Line, Marker
from paceline.report.outcome import Outcome
from paceline.report.records import Floats, finite
from paceline.report.run_files import Curve, RunFiles

# With more points than this, neighboring points would be less than a pixel apart.
MAX_POINTS = 600
# Shorter curves are not smoothed.
_MIN_SMOOTHED = 40
# A curve with a larger ratio of maximum to minimum gets a logarithmic axis, because one spike would
# flatten the rest.
_LOG_SPAN = 100.0
_MAX_SKIP_MARKERS = 200
_MAX_LOGGED_CHARTS = 24


def run_charts(run: RunFiles) -> list[Chart]:
    """Returns the charts of a run; leaves out charts for which the run has no data."""
    axis = _XAxis(run)
    losses, speeds = run.step_curve("loss"), run.step_curve("images_per_s")
    loss_lines = [
        *axis.smoothed("training", losses),
        axis.line("validation", run.eval_curve("loss"), 2),
    ]
    accuracies = [("top-1", "top1"), ("top-5", "top5")][: 1 + run.shows_top5]
    charts = [
        axis.chart(
            "Accuracy (%)",
            [
                axis.line(name, run.eval_curve(key), n)
                for n, (name, key) in enumerate(accuracies, 1)
            ],
            show_value=format_percent,
        ),
        *charts_over_figures(run),
        axis.chart(
            "Loss",
            loss_lines,
            log=spans_decades(loss_lines),
            markers=[*axis.resumes(), *axis.skips()],
            show_value=loss,
            note=_smoothing(losses),
        ),
        axis.chart("Learning rate", [axis.line("rate", run.step_curve("lr"), 1)], from_zero=True),
        *_scheduled(run, axis),
        axis.chart(
            "Throughput (images/s)",
            axis.smoothed("images/s", speeds),
            from_zero=True,
            show_value=rate,
            note=_smoothing(speeds),
        ),
    ]
    if ExposedWaits.of(run).exposed_s is not None:
        waits = run.step_curve("exposed_comm_s")
        waits = replace(waits, value=1e3 * waits.value)
        lines = axis.smoothed("rank 0 waits", waits)
        note = _smoothing(waits)
        charts.append(axis.chart("Exposed communication (ms)", lines, from_zero=True, note=note))
    if len(noise := run.step_curve("noise_scale")):
        lines = axis.smoothed("noise scale", noise)
        charts.append(
            axis.chart(
                "Gradient noise scale (samples)", lines, log=spans_decades(lines), show_value=count
            )
        )
    return charts


def logged_charts(run: RunFiles) -> list[Chart]:
    """Returns a chart for each metric that callbacks logged; each rank has a line."""
    axis, charts = _XAxis(run), []
    for name, by_rank in list(run.logged().items())[:_MAX_LOGGED_CHARTS]:
        lines: list[Line] = []
        for rank, entries in list(by_rank.items())[:SERIES_COLOURS]:
            steps, values = zip(*entries, strict=True)
            points = Curve(np.array(steps), axis.epochs(steps), np.array(values))
            lines.append(axis.line(f"rank {rank}", points, len(lines) + 1))
        charts.append(axis.chart(name, lines, log=spans_decades(lines)))
    return charts


def charts_over_figures(run: RunFiles) -> list[Chart]:
    """Returns charts of accuracy over figures of extensions that are declared as an x axis."""
    charts = []
    for figure in Outcome.of(run).figures:
        top1, top5 = (over_figure(run, name, figure.name) for name in ("top1", "top5"))
        if figure.axis and top1:
            lines = [Line("top-1", top1, 1), Line("top-5", top5, 2)][: 1 + run.shows_top5]
            title, span = f"Accuracy over the {figure.label} (%)", (0.0, top1[-1][0])
            charts.append(Chart(title, figure.axis, lines, span, show_value=format_percent))
    return charts


def over_figure(run: RunFiles, name: str, time_name: str) -> list[XY]:
    """Returns the points (minutes, value) of a curve over the evaluations of a run.

    Args:
        run: The run.
        name: The field of an evaluation record with the value.
        time_name: The field of an evaluation record with the time in seconds.
    """
    return sorted(
        (time / 60, value)
        for record in run.of_kind("eval")
        if (time := finite(record, time_name)) is not None
        and (value := finite(record, name)) is not None
    )


def _scheduled(run: RunFiles, axis: _XAxis) -> list[Chart]:
    """Returns charts of batch size and momentum if a schedule changes them."""
    charts = []
    if len(batches := run.step_curve("batch_size")):
        line = axis.line("samples a step", batches, 1)
        charts.append(axis.chart("Global batch", [line], from_zero=True, show_value=rate))
    if len(momenta := run.step_curve("momentum")):
        charts.append(axis.chart("Momentum", [axis.line("momentum", momenta, 1)]))
    return charts


class _XAxis:
    """Chooses the x axis of all charts: epochs, or steps if the run is shorter than an epoch."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        evaluations = run.of_kind("eval")
        step = np.append(run.steps().number, [r["step"] for r in evaluations])
        evaluated = [finite(r, "epoch") or 0.0 for r in evaluations]
        epoch = np.append(run.steps().or_zero("epoch"), evaluated)
        order = np.lexsort((epoch, step))
        self._steps, self._epochs = step[order], epoch[order]
        self._last_step = int(step.max(initial=0))
        last_epoch = float(epoch.max(initial=0.0))
        self._by_epoch = last_epoch >= 1
        self._label = "epoch" if self._by_epoch else "step"
        self._range: XY = (0.0, (last_epoch if self._by_epoch else float(self._last_step)) or 1.0)

    def line(self, name: str, points: Curve, colour: int, faint: bool = False) -> Line:
        shown = thin(points)
        x = shown.epoch if self._by_epoch else shown.step
        return Line(name, list(zip(x.tolist(), shown.value.tolist(), strict=True)), colour, faint)

    def smoothed(self, name: str, points: Curve) -> list[Line]:
        """Returns a smoothed curve, and a faint line of the values of single steps.

        Short curves are not smoothed.
        """
        if len(points) < _MIN_SMOOTHED:
            return [self.line(name, points, 1)]
        return [
            self.line(name, replace(points, value=moving_median(points.value)), 1),
            self.line("single steps", points, 1, faint=True),
        ]

    def chart(self, title: str, lines: Sequence[Line], **look: Any) -> Chart:
        """Returns a chart with this x axis; `look` has arguments of `Chart`.

        By default, the chart has markers where the run was resumed.
        """
        return Chart(title, self._label, lines, self._range, **{"markers": self.resumes(), **look})

    def resumes(self) -> list[Marker]:
        return [
            Marker(self._x(start["step"]), f"resumed at step {count(start['step'])}")
            for start in self._run.resumes
            if start["step"] <= self._last_step
        ]

    def skips(self) -> list[Marker]:
        skipped = self._run.steps().number[self._run.steps().skipped].tolist()
        every = max(1, -(-len(skipped) // _MAX_SKIP_MARKERS))
        return [
            Marker(self._x(step), f"step {count(step)} skipped", "skip")
            for step in skipped[::every]
        ]

    def _x(self, step: int) -> float:
        return float(self.epochs([step])[0]) if self._by_epoch else float(step)

    def epochs(self, steps: Sequence[int]) -> Floats:
        """Returns the epoch of each step, taken from the last record at or before that step."""
        before = np.searchsorted(self._steps, steps, side="right")
        return np.concatenate([[0.0], self._epochs])[before]


def spans_decades(lines: Sequence[Line]) -> bool:
    """Returns True if the values are positive and need a logarithmic axis (ratio above 100)."""
    values = [value for line in lines for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SPAN


def _smoothing(points: Curve) -> str:
    if len(points) < _MIN_SMOOTHED:
        return ""
    return f"median of {smoothing_window(len(points))} steps"


def thin(points: Curve, limit: int = MAX_POINTS) -> Curve:
    """Reduces a curve to `limit` points: its ends, and medians of groups of points between them."""
    assert limit >= 3
    length = len(points)
    if length <= limit:
        return points
    inner, groups = length - 2, limit - 2
    bounds = [1 + n * inner // groups for n in range(groups + 1)]
    values = points.value.tolist()
    medians = [median(values[a:b]) for a, b in pairwise(bounds)]
    middles = [(a + b) // 2 for a, b in pairwise(bounds)]
    kept = [0, *middles, length - 1]
    value = np.array([values[0], *medians, values[-1]])
    return Curve(points.step[kept], points.epoch[kept], value)


def smoothing_window(length: int) -> int:
    """Returns the width of the smoothing window: an odd number, about 4 % of the curve's points."""
    return max(9, min(501, length // 25)) | 1


def moving_median(values: Floats, window: int | None = None) -> Floats:
    """Replaces each value by the median of its neighbors, so that a spike does not bend the curve.

    Near the start, the window is shortened on both sides, which keeps a steep start. Near the end, it is
    shortened only on the right, so that the last value is not a single measurement.

    Args:
        values: The values of the curve.
        window: The number of points in the window; `smoothing_window` of the length by default.
    """
    length, half = len(values), (window or smoothing_window(len(values))) // 2
    given, ordered, smooth, entered = values.tolist(), list[float](), list[float](), 0
    for i in range(length):
        for value in given[entered : i + min(i, half) + 1]:
            insort(ordered, value)
        entered = min(length, i + min(i, half) + 1)
        if i > half:
            del ordered[bisect_left(ordered, given[i - half - 1])]
        centre = len(ordered) // 2
        odd = len(ordered) % 2
        smooth.append(ordered[centre] if odd else (ordered[centre - 1] + ordered[centre]) / 2)
    return np.array(smooth, float)
