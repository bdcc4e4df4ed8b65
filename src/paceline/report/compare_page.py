"""A comparison as tables, Markdown, JSON, charts and one HTML page.

What is equal in all rows is in the caption instead of a column.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.core.units import (
    UNKNOWN,
    count,
    format_bytes,
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
from paceline.report.html import document, figures, link_to, list_section, section
from paceline.report.run_page import REPORT_NAME
from paceline.report.tables import Table

# Curves of a shorter run are cut into this many parts instead of epochs.
_MIN_PARTS = 20


@dataclass(frozen=True)
class _Column:
    """A column moves to the caption, as `in_caption` writes it, where all rows agree. It is left out
    where the labels of the rows show `setting`."""

    name: str
    cell: Callable[[CompareRow], str]
    in_caption: Callable[[CompareRow], str] | None = None
    setting: str = ""

    def is_common(self, rows: Sequence[CompareRow]) -> bool:
        return self.in_caption is not None and len({self.cell(row) for row in rows}) == 1


def _columns(comparison: Comparison) -> list[_Column]:
    figures = {name: own.column for row in comparison.rows for name, own in row.figures.items()}

    def difference(row: CompareRow) -> str:
        return "baseline" if row is comparison.baseline else _difference(row)

    return [
        _Column("row", lambda row: row.label + ("" if row.complete else " *")),
        _Column("n", lambda row: count(row.top1.n), lambda row: f"n = {count(row.top1.n)}"),
        _Column("top-1 %", _top1),
        _Column("min–max", _range),
        _Column("Δ points", difference),
        _Column("val loss", lambda row: loss(row.val_loss)),
        _Column("images/s", lambda row: rate(row.median("images_per_s"))),
        _Column("train time", lambda row: format_duration(row.median("train_s"))),
        _Column("updates", _updates),
        _Column("exposed", lambda row: _shown(row.exposed_s, format_duration)),
        _Column(
            "optimizer B/param",
            _state,
            lambda row: f"{_state(row)} bytes of optimizer state a parameter",
        ),
        _Column("exchange B/param", _exchange_state, _exchange_state_of_all),
        _Column("sent/step", _sent, lambda row: f"{_sent(row)} sent in a step"),
        *(_Column(column, partial(_figure, name)) for name, column in figures.items()),
        _Column("epochs", _epochs, lambda row: f"{_epochs(row)} epochs"),
        _Column(
            "batch",
            _batches,
            lambda row: f"global batch {_batches(row)}",
            GLOBAL_BATCH,
        ),
        _Column(
            "ranks",
            lambda row: count(row.outcome.world_size),
            lambda row: plural(row.outcome.world_size or 0, "rank"),
            RANKS,
        ),
        _Column("skipped", lambda row: count(row.skipped_steps), _skipped),
    ]


def _figure(name: str, row: CompareRow) -> str:
    return row.figures[name].text if name in row.figures else ""


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    """Empty where it is unknown: a column that is empty in every row is left out."""
    return "" if value is None else show(value)


def _batches(row: CompareRow) -> str:
    """`256 to 1,024`, the first and the largest, where the batch grows."""
    first, largest = row.outcome.global_batch_size, row.outcome.largest_batch
    return count(first) if first == largest else f"{count(first)} to {count(largest)}"


def _updates(row: CompareRow) -> str:
    """Where the batch grows, epochs and batch do not tell them."""
    return count(round(row.steps or 0)) if row.settings.get("optim.batch_schedule") else ""


def _state(row: CompareRow) -> str:
    return _shown(row.median("state_bytes_per_parameter"), number)


def _exchange_state(row: CompareRow) -> str:
    """Memory of the exchange, which the optimizer's state does not include."""
    return _shown(row.median("exchange_state_bytes_per_parameter"), number)


def _exchange_state_of_all(row: CompareRow) -> str:
    """Empty where the exchange keeps nothing, as most do."""
    kept = row.median("exchange_state_bytes_per_parameter")
    return f"{number(kept)} bytes of exchange state a parameter" if kept else ""


def _sent(row: CompareRow) -> str:
    return _shown(row.median("exchange_bytes_per_step"), format_bytes)


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
    """`90`; where not all of them were done, `12 of 90` or `38–41 of 90`."""
    low, high = map(number, row.epochs_done)
    done = low if low == high else f"{low}–{high}"
    planned = number(row.epochs_planned)
    return done if row.complete and planned in (done, UNKNOWN) else f"{done} of {planned}"


def _skipped(row: CompareRow) -> str:
    return plural(row.skipped_steps, "skipped step") if row.skipped_steps else "no skipped steps"


def compare_table(comparison: Comparison) -> Table:
    """A row for each group of seeds, and one for each incomplete run."""
    rows = comparison.rows
    auto_labels = all(row.label == row.auto_label for row in rows)
    columns = [
        column
        for column in _columns(comparison)
        if not column.is_common(rows)
        and not (auto_labels and column.setting in comparison.naming)
        and any(map(column.cell, rows))
    ]
    cells = [tuple(column.cell(row) for column in columns) for row in rows]
    return Table.of("Comparison", tuple(column.name for column in columns), cells, {0})


def compare_caption(comparison: Comparison) -> str:
    """`all: model resnet18, 90 epochs, …`: what the rows have in common."""
    first = comparison.rows[0]
    common = [
        f"{what} {value_text(first.settings, name)}"
        for what, name in (("model", "model.name"), ("optimizer", "optim.name"))
        if name in first.settings and name not in comparison.differing
    ]
    common += [
        text
        for column in _columns(comparison)
        if column.in_caption is not None
        and column.is_common(comparison.rows)
        and column.cell(first)
        and (text := column.in_caption(first))
    ]
    return "all: " + ", ".join(common) if common else ""


def differing_table(comparison: Comparison) -> Table:
    """The settings in which rows differ, with their value in every row."""
    names = comparison.differing
    rows = [
        (row.label, *(value_text(row.settings, name) for name in names)) for row in comparison.rows
    ]
    return Table.of("Settings that differ", ("row", *names), rows if names else [], {0})


def runs_table(comparison: Comparison, folder: Path | None = None) -> Table:
    """Each run on its own, with the label of its row; on a page in `folder`, with links to reports."""
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
    table = Table.of("Runs", columns, rows, {0, 1, 7})
    if folder is None:
        return table
    reports = (run.path / REPORT_NAME for row in comparison.rows for run in row.runs)
    links = tuple(
        link_to(os.path.relpath(report.resolve(), folder.resolve())) if report.is_file() else ""
        for report in reports
    )
    return replace(table, links=links[: len(table.rows)], link_column=1)


def compare_markdown(comparison: Comparison) -> str:
    """Caption, table and notes."""
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
    """All numbers unrounded: accuracies in percent, differences in points, times in seconds. What is
    unknown is null."""
    return {
        "caption": compare_caption(comparison),
        "baseline": comparison.baseline.label,
        "differing": list(comparison.differing),
        "rows": [_row_json(row, comparison.differing) for row in comparison.rows],
        "notes": comparison.notes,
    }


_MEMORY_AND_TRAFFIC = (
    "state_bytes_per_parameter", "exchange_state_bytes", "exchange_state_bytes_per_parameter",
    "exchange_bytes_per_step",
)  # fmt: skip


def _row_json(row: CompareRow, differing: tuple[str, ...]) -> dict[str, Any]:
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
        "images_per_s_median": row.median("images_per_s"),
        "train_s_median": row.median("train_s"),
        "steps_median": row.steps,
        "exposed_s_median": row.exposed_s,
        **{name: row.median(name) for name in _MEMORY_AND_TRAFFIC},
        **{f"{name}_median": own.value for name, own in row.figures.items()},
        "epochs_done_min": low,
        "epochs_done_max": high,
        "epochs_planned": row.epochs_planned,
        "global_batch_size": row.outcome.global_batch_size,
        "largest_batch": row.outcome.largest_batch,
        "world_size": row.outcome.world_size,
        "skipped_steps": row.skipped_steps,
        "runs": [
            {
                "path": str(run.path),
                "seed": run.seed,
                "state": run.outcome.state,
                "top1": run.top1,
                "val_loss": run.val_loss,
                "images_per_s": run.outcome.images_per_s,
                "train_s": run.outcome.train_s,
                "epochs": run.outcome.epochs,
                "skipped_steps": run.outcome.skipped_steps,
            }
            for run in row.runs
        ],
    }


def render_comparison(comparison: Comparison, folder: Path | None = None) -> str:
    """Table, charts, settings and runs as one HTML page; in `folder` it links to the runs' reports."""
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
            section("Runs", [runs_table(comparison, folder)]),
            "<footer>Paceline comparison</footer>",
        ],
    )


def _legend(comparison: Comparison) -> str:
    """One for all charts: the labels of rows are too long for a legend in each."""
    items = []
    for i, row in enumerate(comparison.rows):
        colour, dashed = series_look(i)
        items.append(f'<li class="c{colour}{" dashed" * dashed}">{markup(row.label)}</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def series_look(row: int) -> tuple[int, bool]:
    """The colour of a row, and whether it is dashed, as every second round of colours is."""
    return row % SERIES_COLOURS + 1, row // SERIES_COLOURS % 2 == 1


def compare_charts(comparison: Comparison) -> list[Chart]:
    """Validation top-1 and training loss by epoch: a line per row, the mean over its seeds, and thin
    lines behind it for the seeds."""
    runs = [run for row in comparison.rows for run in row.runs]
    last = max((run.outcome.epochs or 0.0 for run in runs), default=0.0) or 1.0
    width = last / _MIN_PARTS if last < _MIN_PARTS else float(-(-last // MAX_POINTS))

    def top1(run: ComparedRun) -> dict[float, float]:
        # Rounded: the curves of seeds are matched by epoch, which may differ in the last digit.
        found = run.files.eval_curve("top1")
        epochs = (round(epoch, 4) for epoch in found.epoch.tolist())
        return dict(zip(epochs, found.value.tolist(), strict=True))

    def losses(run: ComparedRun) -> dict[float, float]:
        found = run.files.step_curve("loss")
        return _medians(zip(found.epoch.tolist(), found.value.tolist(), strict=True), width)

    accuracy, training = _lines(comparison.rows, top1), _lines(comparison.rows, losses)
    several = any(len(row.runs) > 1 for row in comparison.rows)
    span = "an epoch" if width == 1 else f"{number(width)} epochs"
    return [
        *_charts_over_figures(comparison, several),
        Chart(
            "Validation top-1 (%)", "epoch", accuracy, (0.0, last), show_value=format_percent,
            note="mean, seeds thin" if several else "", legend=False,
        ),
        Chart(
            "Training loss", "epoch", training, (0.0, last), log=spans_decades(training),
            show_value=loss, note=f"median of {span}", legend=False,
        ),
    ]  # fmt: skip


def _charts_over_figures(comparison: Comparison, several: bool) -> list[Chart]:
    """Top-1 over each figure of an extension that wants to be an axis; rows without it have no line."""
    charts = []
    every = {name: own for row in comparison.rows for name, own in row.figures.items() if own.axis}
    for name, own in every.items():

        def top1(run: ComparedRun, name: str = name) -> dict[float, float]:
            return {round(x, 6): y for x, y in over_figure(run.files, "top1", name)}

        lines = _lines(comparison.rows, top1)
        if last := max((x for line in lines for x, _ in line.points), default=0.0):
            charts.append(Chart(
                f"Validation top-1 (%) over the {own.label}", own.axis, lines, (0.0, last),
                show_value=format_percent, note="mean, seeds thin" if several else "", legend=False,
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
        # The mean only where every seed has a value: else it would jump where one begins or ends.
        shared = sorted(set(curves[0]).intersection(*curves[1:]))
        mean = [(x, fmean(curve[x] for curve in curves)) for x in shared]
        lines.append(Line(row.label, mean, colour, dashed=dashed))
    return lines


def _medians(points: Iterable[XY], width: float) -> dict[float, float]:
    """The median of the values up to each multiple of `width`: a spike does not bend the curve."""
    parts: dict[int, list[float]] = {}
    for x, value in points:
        # Rounded, so that the last step of an epoch belongs to it.
        parts.setdefault(int(-(-round(x / width, 6) // 1)), []).append(value)
    return {round(part * width, 4): median(values) for part, values in parts.items()}
