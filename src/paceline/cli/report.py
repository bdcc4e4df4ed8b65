"""`paceline report RUN`: the page and the table of a run, finished or not. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from paceline.report.comparison import Comparison
    from paceline.report.tables import Table


def report_run(
    run: Path = typer.Argument(help="A run folder."),
    out: Path | None = typer.Option(None, help="Where to write the page. Default: in the run."),
) -> int:
    """Write and summarise the report of a run."""
    from paceline.cli.display import print_summary
    from paceline.report.run_page import write_report

    page = write_report(run, out)
    print_summary(Console(), run, page)
    return 0


# `paceline compare RUN…`: several runs as one table, by terminal, Markdown, JSON or page.
#
# In: run folders. Out: a row for each setting with the mean over its seeds. Needs no torch.


# Where the terminal is too narrow for all columns, the second of a pair goes below the first.
_BELOW = {
    "min–max": "top-1 %",
    "train time": "images/s",
    "skipped": "val loss",
    "batch": "epochs",
    "ranks": "n",
}
_NARROW_HEADS = {"val loss": "val\nloss", "train time": "time"}


def compare_runs(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run folders, or folders of run folders."
    ),
    baseline: str | None = typer.Option(
        None, metavar="ROW|RUN", help="What differences are to. Default: the first complete row."
    ),
    label: list[str] = typer.Option([], metavar="RUN=NAME", help="Call the row of RUN so."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page with charts."),
    as_markdown: bool = typer.Option(False, "--markdown", help="The table for a record."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
) -> int:
    """Compare runs: mean and spread over seeds, differences to a baseline."""
    from paceline.report.compare_page import PAGE_NAME, compare_page, json_object, markdown
    from paceline.report.compare_runs import read_runs
    from paceline.report.comparison import Comparison
    from paceline.report.run_page import write_page

    if as_markdown and as_json:
        raise ConfigError("--markdown", None, "cannot be given with --json", "leave out one")
    left_out: list[str] = []
    comparison = Comparison.of(read_runs(runs, left_out), label, baseline, left_out)
    page = None if html is None else write_page(compare_page(comparison), html, PAGE_NAME)
    if as_json:
        typer.echo(json.dumps(json_object(comparison), default=str))
    elif as_markdown:
        typer.echo(markdown(comparison))
    else:
        from rich.console import Console

        print_comparison(Console(), comparison)
    if page is not None:
        # Standard output may be a record or an object for a script.
        typer.echo(f"page: {page}", err=as_json or as_markdown)
    return 0


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Caption, table, notes; in a pipe plain, and each row one line."""
    from paceline.report.compare_page import caption, compare_table

    table = compare_table(comparison)
    drawn = _rich_table(table, boxed=console.is_terminal)
    wanted = console.measure(drawn, options=console.options.update(width=10_000)).maximum
    if wanted > console.width:
        if console.is_terminal:
            drawn = _rich_table(_stacked(table), boxed=True)
        else:
            console.width = wanted
    if text := caption(comparison):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(drawn)
    for note in comparison.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _rich_table(table: Table, *, boxed: bool) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(
        box=box.SIMPLE_HEAD if boxed else None,
        pad_edge=False,
        show_edge=False,
        collapse_padding=boxed,
    )
    for place, name in enumerate(table.columns):
        if place in table.text_columns:
            drawn.add_column(name, overflow="fold")
        else:  # a number must stay whole, so the names of the rows give way
            drawn.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))  # a name in brackets is not markup
    return drawn


def _stacked(table: Table) -> Table:
    """The same figures in fewer, narrower, higher columns."""
    from dataclasses import replace

    head = tuple(_NARROW_HEADS.get(name, name) for name in table.columns)
    below = {_BELOW[name]: name for name in table.columns if _BELOW.get(name) in table.columns}
    columns: list[tuple[str, ...]] = []
    for place, name in enumerate(table.columns):
        cells = tuple(line[place] for line in (head, *table.rows))
        if name in below.values():
            continue
        if name in below:
            second = table.columns.index(below[name])
            lower = (line[second] for line in (head, *table.rows))
            cells = tuple(f"{cell}\n{under}" for cell, under in zip(cells, lower, strict=True))
        if name == "Δ points":
            cells = tuple(cell.replace(" ± ", "\n± ") for cell in cells)
        columns.append(cells)
    first, *rows = zip(*columns, strict=True)
    return replace(table, columns=first, rows=tuple(rows))
