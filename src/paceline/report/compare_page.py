"""Renders a comparison of runs as table, Markdown, JSON, charts and HTML page.

A row is a group of runs that differ only in the seed. Values that are equal in all rows are in the
caption, not in a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from paceline.core.units import (
    UNKNOWN,
    count,
    format_duration,
    format_percent,
    loss,
    markup,
    number,
    plural,
    rate,
    text_of,
)
from paceline.report.chart import SERIES_COLOURS, XY, Chart, Line
from paceline.report.compare_runs import GLOBAL_BATCH, RANKS, ComparedRun
from paceline.report.comparison import CompareRow, Comparison, value_text
from paceline.report.curves import MAX_POINTS, over_figure, spans_decades
from paceline.report.html import document, figures, list_section, section
from paceline.report.tables import Table

# The attributes of `Outcome` in `compare_json`, for each run and for the first run of a row.
_RUN_FIGURES = ("state", "images_per_s", "train_s", "epochs", "skipped_steps")
_ROW_FIGURES = ("global_batch_size", "largest_batch", "world_size")
# If no run is longer than this number of epochs, the loss curves are cut into this number of parts.
_MIN_PARTS = 20


@dataclass(frozen=True)
class _Column:
    """A column of the comparison table.

    Attributes:
        name: The heading.
        cell: Returns the text of the cell in a row. If all cells are empty, the column is left out.
        caption: The name in the caption. If all cells are equal, the caption replaces the column.
        setting: The setting that the column shows. If the row labels contain this setting, the
            column is left out.
    """

    name: str
    cell: Callable[[CompareRow], str]
    caption: str = ""
    setting: str = ""

    def is_common(self, rows: Sequence[CompareRow]) -> bool:
        return bool(self.caption) and len({self.cell(row) for row in rows}) == 1


def _columns(comparison: Comparison) -> list[_Column]:
    extra = {name: figure.column for row in comparison.rows for name, figure in row.figures.items()}

    def difference(row: CompareRow) -> str:
        return "baseline" if row is comparison.baseline else _difference(row)

    return [
        _Column("row", lambda row: row.label + ("" if row.complete else " *")),
        _Column("n", lambda row: count(row.top1.n), "n ="),
        _Column("top-1 %", _top1),
        _Column("min–max", _range),
        _Column("Δ points", difference),
        _Column("val loss", lambda row: loss(row.val_loss)),
        _Column("images/s", lambda row: rate(row.median("images_per_s"))),
        _Column("train time", lambda row: format_duration(row.median("train_s"))),
        _Column("exposed", _exposed),
        *(_Column(column, partial(_figure, name)) for name, column in extra.items()),
        _Column("epochs", _epochs, "epochs"),
        _Column("batch", _batches, "global batch", GLOBAL_BATCH),
        _Column("ranks", lambda row: count(row.first.outcome.world_size), "ranks", RANKS),
        _Column("skipped", lambda row: count(row.skipped_steps), "skipped steps"),
    ]


def _figure(name: str, row: CompareRow) -> str:
    return row.figures[name].text if name in row.figures else ""


def _exposed(row: CompareRow) -> str:
    return "" if row.exposed_s is None else format_duration(row.exposed_s)


def _batches(row: CompareRow) -> str:
    """Returns the global batch size of a run's row, as `256 to 1,024` if the batch grows."""
    first, largest = row.first.outcome.global_batch_size, row.first.outcome.largest_batch
    return count(first) if first == largest else f"{count(first)} to {count(largest)}"


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


def _epochs(row: CompareRow) -> str:
    """Returns the trained epochs as `90` or, if not all were trained, as `12 of 90` or `38–41 of 90`."""
    low, high = map(number, row.epochs_done)
    done = low if low == high else f"{low}–{high}"
    planned = number(row.first.epochs_planned)
    return done if row.complete and planned in (done, UNKNOWN) else f"{done} of {planned}"


def compare_table(comparison: Comparison) -> Table:
    """Returns a table with one row for runs that differ only in the seed, and for each incomplete run."""
    rows = comparison.rows
    columns = [
        column
        for column in _columns(comparison)
        if not column.is_common(rows)
        and (comparison.renamed or column.setting not in comparison.naming)
        and any(map(column.cell, rows))
    ]
    cells = [tuple(column.cell(row) for column in columns) for row in rows]
    return Table.of("Comparison", tuple(column.name for column in columns), cells, {0})


def compare_caption(comparison: Comparison) -> str:
    """Returns the values that are equal in all rows, such as `all: model resnet18, epochs 90`."""
    first = comparison.rows[0]
    common = [
        f"{what} {value_text(first.first.settings, name)}"
        for what, name in (("model", "model.name"), ("optimizer", "optim.name"))
        if name in first.first.settings and name not in comparison.differing
    ]
    common += [
        f"{column.caption} {column.cell(first)}"
        for column in _columns(comparison)
        if column.is_common(comparison.rows) and column.cell(first)
    ]
    return "all: " + ", ".join(common) if common else ""


def differing_table(comparison: Comparison) -> Table:
    """Returns a table of the settings in which rows differ, with the value of each row."""
    names = comparison.differing
    rows = [
        (row.label, *(value_text(row.first.settings, name) for name in names))
        for row in comparison.rows
    ]
    return Table.of("Settings that differ", ("row", *names), rows if names else [], {0})


def runs_table(comparison: Comparison) -> Table:
    """Returns a table with one line for each run and the label of the row to which the run belongs."""
    rows = [
        (
            row.label,
            text_of(run.path),
            text_of(run.seed),
            f"{run.top1:.2f}",
            loss(run.val_loss),
            rate(run.outcome.images_per_s),
            format_duration(run.outcome.train_s),
            run.outcome.state,
        )
        for row in comparison.rows
        for run in row.runs
    ]
    columns = ("row", "run", "seed", "top-1 %", "val loss", "images/s", "train time", "state")
    return Table.of("Runs", columns, rows, {0, 1, 7})


def compare_markdown(comparison: Comparison) -> str:
    """Returns the caption, the table and the notes as Markdown."""
    table = compare_table(comparison)
    rules = ("---" if i in table.text_columns else "--:" for i in range(len(table.columns)))
    lines = [table.columns, tuple(rules), *(tuple(map(_escaped, row)) for row in table.rows)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    parts = [_escaped(compare_caption(comparison)), body, *map(_escaped, comparison.notes)]
    return "\n\n".join(part for part in parts if part)


def _escaped(text: str) -> str:
    for sign in "\\|*<`":
        text = text.replace(sign, f"\\{sign}")
    return text


def compare_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as plain data; numbers are not rounded, and unknown values are None.

    Accuracies are in percent, differences in percentage points, and times in seconds.
    """
    return {
        "caption": compare_caption(comparison),
        "baseline": comparison.baseline.label,
        "differing": list(comparison.differing),
        "rows": [_row_json(row, comparison.differing) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _row_json(row: CompareRow, differing: tuple[str, ...]) -> dict[str, Any]:
    low, high = row.epochs_done
    return {
        "label": row.label,
        "complete": row.complete,
        "settings": {name: row.first.settings.get(name) for name in differing},
        "n": row.top1.n,
        "seeds": [run.seed for run in row.runs],
        "top1_mean": row.top1.mean,
        "top1_std": row.top1.std,
        "top1_min": row.top1.low,
        "top1_max": row.top1.high,
        "difference_points": row.difference and row.difference.points,
        "difference_standard_error": row.difference and row.difference.standard_error,
        "val_loss_mean": row.val_loss,
        "images_per_s_median": row.median("images_per_s"),
        "train_s_median": row.median("train_s"),
        "steps_median": row.median("steps"),
        "exposed_s_median": row.exposed_s,
        **{f"{name}_median": figure.value for name, figure in row.figures.items()},
        "epochs_done_min": low,
        "epochs_done_max": high,
        "epochs_planned": row.first.epochs_planned,
        **{name: getattr(row.first.outcome, name) for name in _ROW_FIGURES},
        "skipped_steps": row.skipped_steps,
        "runs": [
            {
                "path": str(run.path),
                "seed": run.seed,
                "top1": run.top1,
                "val_loss": run.val_loss,
                **{name: getattr(run.outcome, name) for name in _RUN_FIGURES},
            }
            for run in row.runs
        ],
    }


def render_comparison(comparison: Comparison) -> str:
    """Returns table, charts, settings and runs as one HTML page."""
    runs = sum(len(row.runs) for row in comparison.rows)
    title = f"Comparison of {plural(runs, 'run')} in {plural(len(comparison.rows), 'row')}"
    return document(
        title,
        [
            f"<header><p>{markup(compare_caption(comparison))}</p>\n<h1>{markup(title)}</h1></header>",
            section("Result", [compare_table(comparison)]),
            _legend(comparison),
            figures(compare_charts(comparison)),
            list_section("Notes", comparison.notes),
            section("Settings that differ", [differing_table(comparison)]),
            section("Runs", [runs_table(comparison)]),
            "<footer>Paceline comparison</footer>",
        ],
    )


def _legend(comparison: Comparison) -> str:
    """Builds one legend for all charts of the page.

    The labels are too long for a legend in each chart.
    """
    items = []
    for i, row in enumerate(comparison.rows):
        colour, dashed = series_look(i)
        items.append(f'<li class="c{colour}{" dashed" * dashed}">{markup(row.label)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def series_look(row: int) -> tuple[int, bool]:
    """Returns the color of a row, and True if the line is dashed because colors repeat."""
    return row % SERIES_COLOURS + 1, row // SERIES_COLOURS % 2 == 1


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Returns charts of validation top-1 accuracy and training loss by epoch.

    A thick line shows the mean over the seeds of a row, and thin lines show the single seeds.
    """
    runs = [run for row in comparison.rows for run in row.runs]
    last = max((run.outcome.epochs or 0.0 for run in runs), default=0.0) or 1.0
    width = last / _MIN_PARTS if last < _MIN_PARTS else float(-(-last // MAX_POINTS))

    def top1(run: ComparedRun) -> dict[float, float]:
        # Round, because the epoch of the same evaluation can differ in the last digit between seeds.
        curve = run.files.eval_curve("top1")
        epochs = (round(epoch, 4) for epoch in curve.epoch.tolist())
        return dict(zip(epochs, curve.value.tolist(), strict=True))

    def losses(run: ComparedRun) -> dict[float, float]:
        curve = run.files.step_curve("loss")
        return _medians(zip(curve.epoch.tolist(), curve.value.tolist(), strict=True), width)

    training = _lines(comparison.rows, losses)
    note = "mean, seeds thin" if any(len(row.runs) > 1 for row in comparison.rows) else ""
    span = "an epoch" if width == 1 else f"{number(width)} epochs"
    return [
        *_charts_over_figures(comparison, note),
        Chart(
            "Validation top-1 (%)", "epoch", _lines(comparison.rows, top1), (0.0, last),
            show_value=format_percent, note=note, legend=False,
        ),
        Chart(
            "Training loss", "epoch", training, (0.0, last), log=spans_decades(training),
            show_value=loss, note=f"median of {span}", legend=False,
        ),
    ]  # fmt: skip


def _charts_over_figures(comparison: Comparison, note: str) -> list[Chart]:
    """Returns charts of top-1 accuracy over figures of extensions, such as predicted hours."""
    charts = []
    axes = {name: figure for row in comparison.rows for name, figure in row.figures.items()}
    for name, figure in axes.items():

        def top1(run: ComparedRun, name: str = name) -> dict[float, float]:
            return {round(x, 6): y for x, y in over_figure(run.files, "top1", name)}

        lines = _lines(comparison.rows, top1) if figure.axis else []
        if last := max((x for line in lines for x, _ in line.points), default=0.0):
            charts.append(Chart(
                f"Validation top-1 (%) over the {figure.label}", figure.axis, lines, (0.0, last),
                show_value=format_percent, note=note, legend=False,
            ))  # fmt: skip
    return charts


def _lines(
    rows: Sequence[CompareRow], curve_of: Callable[[ComparedRun], dict[float, float]]
) -> list[Line]:
    lines = []
    for i, row in enumerate(rows):
        colour, dashed = series_look(i)
        curves = [curve_of(run) for run in row.runs]
        if len(curves) > 1:
            lines += [Line("", sorted(curve.items()), colour, faint=True) for curve in curves]
        # Leave out points that only some seeds have, because the mean would jump there.
        common = sorted(set(curves[0]).intersection(*curves[1:]))
        mean = [(x, fmean(curve[x] for curve in curves)) for x in common]
        lines.append(Line(row.label, mean, colour, dashed=dashed))
    return lines


def _medians(points: Iterable[XY], width: float) -> dict[float, float]:
    """Returns the median y value in each interval of length `width`, by the interval's end."""
    parts: dict[int, list[float]] = {}
    for x, value in points:
        # Round, so that the last step of an epoch belongs to that epoch.
        parts.setdefault(int(-(-round(x / width, 6) // 1)), []).append(value)
    return {round(part * width, 4): median(values) for part, values in parts.items()}
