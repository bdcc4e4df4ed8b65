"""The table of a comparison, its caption, and both as Markdown.

In: a `Comparison`. Out: a `Table` of plain text cells for terminal, page and record alike. What is
the same in all rows stands in the caption instead of a column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.report.compare_labels import value_text
from paceline.report.compare_rows import CompareRow
from paceline.report.compare_runs import GLOBAL_BATCH, RANKS
from paceline.report.comparison import Comparison
from paceline.report.quantities import UNKNOWN, count, duration, loss, many, number, rate, shown
from paceline.report.tables import Table

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
