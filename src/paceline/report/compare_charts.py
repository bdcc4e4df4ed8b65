"""The two charts of a comparison: validation top-1 and training loss over epochs.

In: a `Comparison`. Out: `Chart`s with one line a row, the mean over its seeds, and thin lines behind
it for the seeds themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from paceline.report.compare_rows import CompareRow
from paceline.report.compare_runs import ComparedRun
from paceline.report.comparison import Comparison
from paceline.report.page_style import SERIES_COLOURS
from paceline.report.quantities import loss, number, percent
from paceline.report.run_charts import spans_decades
from paceline.report.series import MAX_POINTS, eval_points, median, step_points
from paceline.report.svg_chart import XY, Chart, Line

# A run of fewer epochs than this is cut finer than by the epoch.
_MIN_BUCKETS = 20

Curve = Callable[[ComparedRun], dict[float, float]]


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Accuracy and loss, on one x axis."""
    runs = [run for row in comparison.rows for run in row.runs]
    last = max((run.outcome.epochs or 0.0 for run in runs), default=0.0) or 1.0
    width = _bucket_epochs(last)

    def losses(run: ComparedRun) -> dict[float, float]:
        points = ((point.epoch, point.value) for point in step_points(run.files, "loss"))
        return _bucketed(points, width)

    accuracy, training = _lines(comparison.rows, _top1), _lines(comparison.rows, losses)
    thin = "mean, seeds thin" if any(len(row.runs) > 1 for row in comparison.rows) else ""
    span = "an epoch" if width == 1 else f"{number(width)} epochs"
    return [
        Chart(
            "Validation top-1 (%)", "epoch", accuracy, (0.0, last),
            show_value=percent, note=thin, legend=False,
        ),
        Chart(
            "Training loss", "epoch", training, (0.0, last),
            log=spans_decades(training), show_value=loss, note=f"median of {span}", legend=False,
        ),
    ]  # fmt: skip


def series_look(place: int) -> tuple[int, bool]:
    """Colour of the row at `place`, and whether it is dashed, as those past the last colour are."""
    return place % SERIES_COLOURS + 1, place // SERIES_COLOURS % 2 == 1


def _lines(rows: Sequence[CompareRow], curve: Curve) -> list[Line]:
    lines = []
    for place, row in enumerate(rows):
        colour, dashed = series_look(place)
        curves = [curve(run) for run in row.runs]
        if len(curves) > 1:
            lines += [Line("", sorted(of_seed.items()), colour, faint=True) for of_seed in curves]
        lines.append(Line(row.label, _mean(curves), colour, dashed=dashed))
    return lines


def _mean(curves: Sequence[dict[float, float]]) -> list[XY]:
    """Only where every seed has a value: else the line would jump where one begins or ends."""
    shared = set(curves[0]).intersection(*curves[1:])
    return [(x, fmean(curve[x] for curve in curves)) for x in sorted(shared)]


def _top1(run: ComparedRun) -> dict[float, float]:
    # Rounded, because seeds are matched by their epoch and a float's last digit is not one.
    return {round(point.epoch, 4): point.value for point in eval_points(run.files, "top1")}


def _bucket_epochs(last: float) -> float:
    """Width of a bucket: whole epochs, or a twentieth of a run that has few."""
    if last < _MIN_BUCKETS:
        return last / _MIN_BUCKETS
    return float(-(-last // MAX_POINTS))


def _bucketed(points: Iterable[XY], width: float) -> dict[float, float]:
    """The median of the values up to each multiple of `width`: one spike must not bend the curve."""
    buckets: dict[int, list[float]] = {}
    for x, value in points:
        # A step that ends an epoch belongs to it, whatever the float's last digit says.
        buckets.setdefault(int(-(-round(x / width, 6) // 1)), []).append(value)
    return {round(place * width, 4): median(values) for place, values in buckets.items()}
