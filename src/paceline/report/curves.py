"""The curves of a run: accuracy, loss, learning rate, throughput, exposed communication. Many points are
thinned and smoothed."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from statistics import median

from paceline.core.units import format_percent
from paceline.report.bottleneck import ExposedWaits
from paceline.report.chart import XY, Chart, Line, Marker
from paceline.report.quantities import count, loss, number, rate
from paceline.report.run_files import Point, RunFiles, finite

# More points than this are closer than a pixel in a chart of one column.
MAX_POINTS = 600
# A shorter curve is not smoothed.
_MIN_SMOOTHED = 40
# A loss that spans more than this has a logarithmic axis: else one spike flattens the rest.
_LOG_SPAN = 100.0
_MAX_SKIP_MARKERS = 200


def run_charts(run: RunFiles) -> list[Chart]:
    """The last one, exposed communication, only for runs of several ranks."""
    axis = _XAxis(run)
    losses, speeds = run.points("step", "loss"), run.points("step", "images_per_s")
    loss_lines = [
        *axis.smoothed("training", losses),
        axis.line("validation", run.points("eval", "loss"), 2),
    ]
    charts = [
        axis.chart(
            "Accuracy (%)",
            [
                axis.line("top-1", run.points("eval", "top1"), 1),
                axis.line("top-5", run.points("eval", "top5"), 2),
            ],
            show_value=format_percent,
        ),
        axis.chart(
            "Loss",
            loss_lines,
            log=spans_decades(loss_lines),
            markers=[*axis.resumes(), *axis.skips()],
            show_value=loss,
            note=_smoothing(losses),
        ),
        axis.chart(
            "Learning rate", [axis.line("rate", run.points("step", "lr"), 1)], from_zero=True
        ),
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
        waits = [p._replace(value=1e3 * p.value) for p in run.points("step", "exposed_comm_s")]
        lines = axis.smoothed("rank 0 waits", waits)
        note = _smoothing(waits)
        charts.append(axis.chart("Exposed communication (ms)", lines, from_zero=True, note=note))
    if noise := run.points("step", "noise_scale"):
        lines = axis.smoothed("noise scale", noise)
        charts.append(
            axis.chart(
                "Gradient noise scale (samples)", lines, log=spans_decades(lines), show_value=count
            )
        )
    return charts


def _scheduled(run: RunFiles, axis: _XAxis) -> list[Chart]:
    """Charts of batch and momentum, where a schedule changes them."""
    found = []
    if batches := run.points("step", "batch_size"):
        line = axis.line("samples a step", batches, 1)
        found.append(axis.chart("Global batch", [line], from_zero=True, show_value=rate))
    if momenta := run.points("step", "momentum"):
        found.append(axis.chart("Momentum", [axis.line("momentum", momenta, 1)]))
    return found


class _XAxis:
    """Epochs, or steps where the run is shorter than an epoch."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        records = [*run.of_kind("step"), *run.of_kind("eval")]
        self._epochs = sorted((r["step"], finite(r, "epoch") or 0.0) for r in records)
        self._last_step = max((step for step, _ in self._epochs), default=0)
        last_epoch = max((epoch for _, epoch in self._epochs), default=0.0)
        self._by_epoch = last_epoch >= 1
        self._label = "epoch" if self._by_epoch else "step"
        self._range: XY = (0.0, (last_epoch if self._by_epoch else float(self._last_step)) or 1.0)

    def line(self, name: str, points: Sequence[Point], colour: int, faint: bool = False) -> Line:
        xy = [(p.epoch if self._by_epoch else p.step, p.value) for p in thin(points)]
        return Line(name, xy, colour, faint)

    def smoothed(self, name: str, points: Sequence[Point]) -> list[Line]:
        """The smoothed curve, with the measured values behind it."""
        if len(points) < _MIN_SMOOTHED:
            return [self.line(name, points, 1)]
        return [
            self.line(name, moving_median(points), 1),
            self.line("single steps", points, 1, faint=True),
        ]

    def chart(
        self,
        title: str,
        lines: Sequence[Line],
        *,
        log: bool = False,
        from_zero: bool = False,
        markers: Sequence[Marker] | None = None,
        show_value: Callable[[float], str] = number,
        note: str = "",
    ) -> Chart:
        shown = self.resumes() if markers is None else markers
        return Chart(
            title, self._label, lines, self._range, log, from_zero, shown, show_value, note
        )

    def resumes(self) -> list[Marker]:
        return [
            Marker(self._x(start["step"]), f"resumed at step {count(start['step'])}")
            for start in self._run.resumes
            if start["step"] <= self._last_step
        ]

    def skips(self) -> list[Marker]:
        skipped = [record for record in self._run.of_kind("step") if record.get("skipped") is True]
        every = max(1, -(-len(skipped) // _MAX_SKIP_MARKERS))
        return [
            Marker(self._x(record["step"]), f"step {count(record['step'])} skipped", "skip")
            for record in skipped[::every]
        ]

    def _x(self, step: int) -> float:
        """A step on the axis; its epoch is that of the last record up to it."""
        if not self._by_epoch:
            return float(step)
        before = bisect_right(self._epochs, (step, math.inf))
        return self._epochs[before - 1][1] if before else 0.0


def spans_decades(lines: Sequence[Line]) -> bool:
    """Whether only a logarithmic axis shows all values."""
    values = [value for line in lines for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SPAN


def _smoothing(points: Sequence[Point]) -> str:
    if len(points) < _MIN_SMOOTHED:
        return ""
    return f"median of {smoothing_window(len(points))} steps"


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the first, the last, and between them the median of each group."""
    assert limit >= 3
    if len(points) <= limit:
        return list(points)
    inner, groups = len(points) - 2, limit - 2
    thinned = [points[0]]
    for n in range(groups):
        group = points[1 + n * inner // groups : 1 + (n + 1) * inner // groups]
        middle = group[len(group) // 2]
        thinned.append(middle._replace(value=median(point.value for point in group)))
    return [*thinned, points[-1]]


def smoothing_window(length: int) -> int:
    """An odd number of points, about 4 % of the curve."""
    return max(9, min(501, length // 25)) | 1


def moving_median(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """Each value replaced by the median of those around it: a spike in the loss does not bend the curve.

    At the start the window grows with the curve, which keeps a steep start; at the end it shrinks on one
    side, so that the last value is not a single measurement.
    """
    half = (window or smoothing_window(len(points))) // 2
    ordered: list[float] = []
    smooth = []
    entered = 0
    for i, point in enumerate(points):
        while entered <= min(len(points) - 1, i + min(i, half)):
            insort(ordered, points[entered].value)
            entered += 1
        if i > half:
            del ordered[bisect_left(ordered, points[i - half - 1].value)]
        middle = len(ordered) // 2
        value = ordered[middle]
        if len(ordered) % 2 == 0:
            value = (ordered[middle - 1] + value) / 2
        smooth.append(point._replace(value=value))
    return smooth
