"""Prints tables in the terminal: the summary of a run, comparisons and predictions."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paceline.core.untrusted import one_line
from paceline.report import RunFiles, Table, summary_rows, verdict
from paceline.train.display import print_line


def print_summary(console: Console, folder: Path, page: Path) -> None:
    """Prints the result of the run in `folder` in one line, its main results, and the report's path."""
    run = RunFiles.read(folder)
    table = RichTable(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for label, value in summary_rows(run):
        table.add_row(label, Text(value))  # names may contain brackets, which are markup
    print_line(console, verdict(run))
    console.print(table)
    print_line(console, f"report: {page}")


def rich_table(table: Table, *, boxed: bool, caption: str | None = None) -> RichTable:
    """Converts a report table for the terminal; headings and text cells wrap, numbers do not."""
    drawn = RichTable(
        box=box.SIMPLE_HEAD if boxed else None, pad_edge=False, show_edge=False,
        collapse_padding=boxed, caption=caption, caption_justify="left",
    )  # fmt: skip
    for i, (name, *cells) in enumerate(zip(table.columns, *table.rows, strict=True)):
        if i in table.text_columns:
            drawn.add_column(name, overflow="fold")
        else:
            drawn.add_column(name, justify="right", min_width=max(map(len, cells), default=1))
    for row in table.rows:
        # Labels may contain brackets, which are markup.
        drawn.add_row(*(Text(one_line(cell)) for cell in row))
    return drawn


def widen_pipe(console: Console, tables: Iterable[RichTable]) -> None:
    """Makes output to a pipe as wide as the widest table, so that each row is one line."""
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        widths = (console.measure(table, options=wide).maximum for table in tables)
        console.width = max(console.width, *widths)
