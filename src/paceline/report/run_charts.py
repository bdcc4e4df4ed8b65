"""The four charts of a run: accuracy, loss, learning rate, throughput.

In: a `RunFiles`. Out: `Chart`s that share one x axis, so that a drop of the rate and the rise of
the accuracy lie beneath one another.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from paceline.report.chart import XY, Chart, Line, Marker
from paceline.report.quantities import count, loss, number, percent, rate
from paceline.report.run_files import (
    Point,
    RunFiles,
    eval_points,
    finite,
    moving_median,
    smoothing_window,
    step_points,
    thin,
)
from paceline.report.tables import ExposedWaits

# A loss that spans more than this is drawn on a logarithmic scale: else one spike flattens the rest.
_LOG_SPAN = 100.0
# Below so many points the line itself is plain enough.
_MIN_SMOOTHED = 40
_MAX_SKIP_MARKERS = 200


def run_charts(run: RunFiles) -> list[Chart]:
    """Accuracy, loss, learning rate and throughput, in that order; of several ranks also how long a step
    waits for its exchange."""
    axis = _XAxis(run)
    losses, speeds = step_points(run, "loss"), step_points(run, "images_per_s")
    loss_lines = [
        *axis.smoothed("training", losses, 1),
        axis.line("validation", eval_points(run, "loss"), 2),
    ]
    charts = [
        axis.chart(
            "Accuracy (%)",
            [
                axis.line("top-1", eval_points(run, "top1"), 1),
                axis.line("top-5", eval_points(run, "top5"), 2),
            ],
            show_value=percent,
        ),
        axis.chart(
            "Loss",
            loss_lines,
            log=spans_decades(loss_lines),
            markers=[*axis.resumes(), *axis.skips()],
            show_value=loss,
            note=_smoothing(losses),
        ),
        axis.chart("Learning rate", [axis.line("rate", step_points(run, "lr"), 1)], from_zero=True),
        axis.chart(
            "Throughput (images/s)",
            axis.smoothed("images/s", speeds, 1),
            from_zero=True,
            show_value=rate,
            note=_smoothing(speeds),
        ),
    ]
    if ExposedWaits.of(run).exposed_s is not None:
        waits = [p._replace(value=1e3 * p.value) for p in step_points(run, "exposed_comm_s")]
        lines = axis.smoothed("rank 0 waits", waits, 1)
        note = _smoothing(waits)
        charts.append(axis.chart("Exposed communication (ms)", lines, from_zero=True, note=note))
    return charts


class _XAxis:
    """Epochs, or steps where the whole run is shorter than an epoch."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        records = [*run.of_kind("step"), *run.of_kind("eval")]
        last_epoch = max((finite(record, "epoch") or 0.0 for record in records), default=0.0)
        self._last_step = max((record["step"] for record in records), default=0)
        self.by_epoch = last_epoch >= 1
        self.label = "epoch" if self.by_epoch else "step"
        self.range: XY = (0.0, (last_epoch if self.by_epoch else float(self._last_step)) or 1.0)
        self._epochs = sorted(
            (record["step"], finite(record, "epoch") or 0.0) for record in records
        )

    def line(self, name: str, points: Sequence[Point], colour: int, faint: bool = False) -> Line:
        places = [(p.epoch if self.by_epoch else p.step, p.value) for p in thin(points)]
        return Line(name, places, colour, faint)

    def smoothed(self, name: str, points: Sequence[Point], colour: int) -> list[Line]:
        """The curve, and behind it, where it is long, what was measured."""
        if len(points) < _MIN_SMOOTHED:
            return [self.line(name, points, colour)]
        return [
            self.line(name, moving_median(points), colour),
            self.line("single steps", points, colour, faint=True),
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
        shown_markers = self.resumes() if markers is None else markers
        return Chart(
            title, self.label, lines, self.range, log, from_zero, shown_markers, show_value, note
        )

    def resumes(self) -> list[Marker]:
        return [
            Marker(self._x(start["step"]), f"resumed at step {count(start['step'])}")
            for start in self._run.resumes
            if start["step"] <= self._last_step
        ]

    def skips(self) -> list[Marker]:
        skipped = [record for record in self._run.of_kind("step") if record.get("skipped") is True]
        if len(skipped) > _MAX_SKIP_MARKERS:
            every = -(-len(skipped) // _MAX_SKIP_MARKERS)
            skipped = skipped[::every]
        return [
            Marker(self._x(record["step"]), f"step {count(record['step'])} skipped", "skip")
            for record in skipped
        ]

    def _x(self, step: int) -> float:
        """Where a step lies: by epoch, where the last record up to it lies."""
        if not self.by_epoch:
            return float(step)
        before = bisect_right(self._epochs, (step, math.inf))
        return self._epochs[before - 1][1] if before else 0.0


def _smoothing(points: Sequence[Point]) -> str:
    if len(points) < _MIN_SMOOTHED:
        return ""
    return f"median of {smoothing_window(len(points))} steps"


def spans_decades(lines: Sequence[Line]) -> bool:
    """Whether the values spread so far that only a logarithmic scale shows them all."""
    values = [value for line in lines for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SPAN
