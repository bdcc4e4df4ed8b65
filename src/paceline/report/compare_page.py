"""The page of a comparison: the table, two charts, the settings that differ, the runs.

In: a `Comparison`. Out: one HTML page in the style of a run's report, which needs nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from paceline.report.chart import XY, Chart, Line
from paceline.report.compare_runs import GLOBAL_BATCH, RANKS, ComparedRun, value_text
from paceline.report.comparison import CompareRow, Comparison
from paceline.report.html import SERIES_COLOURS, document, figures, remarks, section
from paceline.report.quantities import (
    UNKNOWN,
    count,
    duration,
    loss,
    many,
    markup,
    number,
    percent,
    rate,
    shown,
)
from paceline.report.run_charts import spans_decades
from paceline.report.run_files import MAX_POINTS, eval_points, median, step_points
from paceline.report.tables import Table

# The table of a comparison, its caption, and both as Markdown.
#
# In: a `Comparison`. Out: a `Table` of plain text cells for terminal, page and record alike. What
# is the same in all rows stands in the caption instead of a column.


ROW = "row"
INCOMPLETE = " *"


@dataclass(frozen=True)
class _Column:
    """A column; with `in_caption` it moves there where all rows agree.

    `setting`: where the rows' names show that setting, the column would only repeat it.
    """

    name: str
    cell: Callable[[CompareRow], str]
    in_caption: Callable[[CompareRow], str] | None = None
    setting: str = ""


def compare_table(comparison: Comparison) -> Table:
    """One row for each group of seeds, and one for each incomplete run."""
    rows = comparison.rows
    columns = [
        column
        for column in _columns(comparison)
        if not _is_common(column, comparison)
        and not _is_named(column, comparison)
        and any(column.cell(row) for row in rows)
    ]
    cells = [tuple(column.cell(row) for column in columns) for row in rows]
    return Table.of("Comparison", tuple(column.name for column in columns), cells, {0})


def caption(comparison: Comparison) -> str:
    """`all: model resnet18, 90 epochs, …`: what the rows have in common."""
    first = comparison.rows[0]
    common = [
        f"{what} {value_text(first.settings, name)}"
        for what, name in (("model", "model.name"), ("optimizer", "optim.name"))
        if name in first.settings and name not in comparison.differing
    ]
    common += [
        column.in_caption(first)
        for column in _columns(comparison)
        if column.in_caption is not None and _is_common(column, comparison)
    ]
    return "all: " + ", ".join(common) if common else ""


def differing_table(comparison: Comparison) -> Table:
    """The settings in which rows differ, with their value in every row."""
    names = comparison.differing
    rows = [
        (row.label, *(value_text(row.settings, name) for name in names)) for row in comparison.rows
    ]
    return Table.of("Settings that differ", (ROW, *names), rows if names else [], {0})


def runs_table(comparison: Comparison) -> Table:
    """Each run by itself, under the name of its row."""
    rows = [
        (
            row.label,
            shown(run.path),
            UNKNOWN if run.seed is None else str(run.seed),
            f"{run.top1:.2f}",
            loss(run.val_loss),
            rate(run.outcome.images_per_s),
            duration(run.outcome.train_s),
            run.outcome.state,
        )
        for row in comparison.rows
        for run in row.runs
    ]
    columns = (ROW, "run", "seed", "top-1 %", "val loss", "images/s", "train time", "state")
    return Table.of("Runs", columns, rows, {0, 1, 7})


def markdown(comparison: Comparison) -> str:
    """Caption, table and notes for a record on GitHub."""
    table = compare_table(comparison)
    rules = ("---" if i in table.text_columns else "--:" for i in range(len(table.columns)))
    lines = [table.columns, tuple(rules), *(tuple(map(_escaped, row)) for row in table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [_escaped(caption(comparison)), body, *map(_escaped, comparison.notes)]
    return "\n\n".join(part for part in parts if part)


def epochs_text(row: CompareRow) -> str:
    """`90`; where not all of them were done, `12 of 90`, or `38–41 of 90`."""
    low, high = row.epochs_done
    done = number(low) if number(low) == number(high) else f"{number(low)}–{number(high)}"
    planned = number(row.epochs_planned)
    if row.complete and planned in (done, UNKNOWN):
        return done
    return f"{done} of {planned}"


def _columns(comparison: Comparison) -> list[_Column]:
    def difference(row: CompareRow) -> str:
        return "baseline" if row is comparison.baseline else _difference(row)

    return [
        _Column(ROW, lambda row: row.label + ("" if row.complete else INCOMPLETE)),
        _Column("n", lambda row: count(row.top1.n), lambda row: f"n = {count(row.top1.n)}"),
        _Column("top-1 %", _top1),
        _Column("min–max", _range),
        _Column("Δ points", difference),
        _Column("val loss", lambda row: loss(row.val_loss)),
        _Column("images/s", lambda row: rate(row.images_per_s)),
        _Column("train time", lambda row: duration(row.train_s)),
        _Column("epochs", epochs_text, lambda row: f"{epochs_text(row)} epochs"),
        _Column(
            "batch",
            lambda row: count(row.global_batch_size),
            lambda row: f"global batch {count(row.global_batch_size)}",
            GLOBAL_BATCH,
        ),
        _Column(
            "ranks",
            lambda row: count(row.world_size),
            lambda row: many(row.world_size or 0, "rank"),
            RANKS,
        ),
        _Column("skipped", lambda row: count(row.skipped_steps), _skipped),
    ]


def _is_common(column: _Column, comparison: Comparison) -> bool:
    if column.in_caption is None:
        return False
    return len({column.cell(row) for row in comparison.rows}) == 1


def _is_named(column: _Column, comparison: Comparison) -> bool:
    return column.setting in comparison.naming and all(
        row.label == row.auto_label for row in comparison.rows
    )


def _top1(row: CompareRow) -> str:
    spread = "" if row.top1.std is None else f" ± {row.top1.std:.2f}"
    return f"{row.top1.mean:.2f}{spread}"


def _range(row: CompareRow) -> str:
    return f"{row.top1.low:.2f}–{row.top1.high:.2f}" if row.top1.n > 1 else ""


def _difference(row: CompareRow) -> str:
    if row.difference is None:
        return UNKNOWN
    error = row.difference.standard_error
    return f"{row.difference.points:+.2f}" + ("" if error is None else f" ± {error:.2f}")


def _skipped(row: CompareRow) -> str:
    return f"{many(row.skipped_steps, 'skipped step')}" if row.skipped_steps else "no skipped steps"


def _escaped(text: str) -> str:
    for sign in "\\|*<`":
        text = text.replace(sign, f"\\{sign}")
    return text


# A comparison as one JSON object, for scripts and records.
#
# In: a `Comparison`. Out: plain tables: the caption, each row with all its numbers unrounded, and
# the runs of each row. What is not known is null.


def json_object(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison; accuracies in percent, differences in points, times in seconds."""
    return {
        "caption": caption(comparison),
        "baseline": comparison.baseline.label,
        "differing": list(comparison.differing),
        "rows": [_row(row, comparison.differing) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _row(row: CompareRow, differing: tuple[str, ...]) -> dict[str, Any]:
    low, high = row.epochs_done
    return {
        "label": row.label,
        "complete": row.complete,
        "settings": {name: row.settings.get(name) for name in differing},
        "n": row.top1.n,
        "seeds": [run.seed for run in row.runs],
        "top1_mean": row.top1.mean,
        "top1_std": row.top1.std,
        "top1_min": row.top1.low,
        "top1_max": row.top1.high,
        "difference_points": row.difference and row.difference.points,
        "difference_standard_error": row.difference and row.difference.standard_error,
        "val_loss_mean": row.val_loss,
        "images_per_s_median": row.images_per_s,
        "train_s_median": row.train_s,
        "epochs_done_min": low,
        "epochs_done_max": high,
        "epochs_planned": row.epochs_planned,
        "global_batch_size": row.global_batch_size,
        "world_size": row.world_size,
        "skipped_steps": row.skipped_steps,
        "runs": [_run(run) for run in row.runs],
    }


def _run(run: ComparedRun) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "path": str(run.path),
        "seed": run.seed,
        "state": outcome.state,
        "top1": run.top1,
        "val_loss": run.val_loss,
        "images_per_s": outcome.images_per_s,
        "train_s": outcome.train_s,
        "epochs": outcome.epochs,
        "skipped_steps": outcome.skipped_steps,
    }


# The two charts of a comparison: validation top-1 and training loss over epochs.
#
# In: a `Comparison`. Out: `Chart`s with one line a row, the mean over its seeds, and thin lines
# behind it for the seeds themselves.


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

    accuracy, training = _lines(comparison.rows, _top1_chart), _lines(comparison.rows, losses)
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


def _top1_chart(run: ComparedRun) -> dict[float, float]:
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


PAGE_NAME = "compare.html"


def compare_page(comparison: Comparison) -> str:
    """The whole page."""
    runs = sum(len(row.runs) for row in comparison.rows)
    title = f"Comparison of {many(runs, 'run')} in {many(len(comparison.rows), 'row')}"
    return document(
        title,
        [
            f"<header><p>{markup(caption(comparison))}</p>\n<h1>{markup(title)}</h1></header>",
            section("Result", [compare_table(comparison)]),
            _key(comparison),
            figures(compare_charts(comparison)),
            remarks("Remarks", comparison.notes),
            section("Settings that differ", [differing_table(comparison)]),
            section("Runs", [runs_table(comparison)]),
            "<footer>Paceline comparison</footer>",
        ],
    )


def _key(comparison: Comparison) -> str:
    """Which colour is which row: their names are too long for a legend in a chart."""
    items = []
    for place, row in enumerate(comparison.rows):
        colour, dashed = series_look(place)
        look = f"c{colour}" + (" dashed" if dashed else "")
        items.append(f'<li class="{look}">{markup(row.label)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'
