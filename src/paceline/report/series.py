"""Curves of a run, thinned to what a chart can show.

In: a `RunFiles`. Out: points (step, epoch, value) of one quantity, few enough to draw. Steps whose
value is not a number (a loss that overflowed) have no point.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from paceline.report.run_files import RunFiles, finite

# More points than this lie closer than a pixel in a chart of one column.
MAX_POINTS = 600


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    epoch: float
    value: float


def step_points(run: RunFiles, field: str) -> list[Point]:
    """A quantity of the training steps: `loss`, `lr`, `images_per_s`."""
    return _points(run, "step", field)


def eval_points(run: RunFiles, field: str) -> list[Point]:
    """A quantity of the evaluations: `top1`, `top5`, `loss`."""
    return _points(run, "eval", field)


def _points(run: RunFiles, kind: str, field: str) -> list[Point]:
    points = [
        Point(record["step"], finite(record, "epoch") or 0.0, value)
        for record in run.of_kind(kind)
        if (value := finite(record, field)) is not None
    ]
    return sorted(points)


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    assert values
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: both ends as they are, between them the median of each bucket."""
    assert limit >= 3
    if len(points) <= limit:
        return list(points)
    inner, buckets = len(points) - 2, limit - 2
    thinned = [points[0]]
    for bucket in range(buckets):
        group = points[1 + bucket * inner // buckets : 1 + (bucket + 1) * inner // buckets]
        middle = group[len(group) // 2]
        thinned.append(middle._replace(value=median([point.value for point in group])))
    return [*thinned, points[-1]]


def smoothing_window(length: int) -> int:
    """An odd number of points, some 4 % of the curve: steady, yet it follows a change of rate."""
    return max(9, min(501, length // 25)) | 1


def moving_median(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """Each value replaced by the median of those around it.

    A median, not a mean: one spike in the loss must not bend the curve for a whole window. The
    window opens with the curve, so that a steep start stays; at the end it takes what there is, so
    that the last value is no single one.
    """
    half = (window or smoothing_window(len(points))) // 2
    ordered: list[float] = []
    smooth = []
    entered = 0
    for place, point in enumerate(points):
        while entered <= min(len(points) - 1, place + min(place, half)):
            insort(ordered, points[entered].value)
            entered += 1
        if place > half:
            del ordered[bisect_left(ordered, points[place - half - 1].value)]
        middle = len(ordered) // 2
        value = ordered[middle]
        if len(ordered) % 2 == 0:
            value = (ordered[middle - 1] + value) / 2
        smooth.append(point._replace(value=value))
    return smooth
