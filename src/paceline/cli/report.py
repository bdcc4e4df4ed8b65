"""`paceline report`, `compare` and `watch`: pages and tables of runs, finished or not. Need no torch."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from paceline.cli.options import AsJson
from paceline.cli.summary import print_summary
from paceline.core.errors import ConfigError, DataError
from paceline.report import Table, write_page, write_report
from paceline.report.compare_page import (
    compare_caption,
    compare_json,
    compare_markdown,
    compare_table,
    render_comparison,
)
from paceline.report.compare_runs import read_runs
from paceline.report.comparison import Comparison
from paceline.report.live_run import run_folders
from paceline.report.server import (
    LOOPBACK,
    MAX_RUNS,
    PORT,
    WatchServer,
    is_loopback,
    open_socket,
)
from paceline.train.display import print_line

# Where the terminal is too narrow for all columns, the first of a pair goes below the second.
_BELOW = {
    "min–max": "top-1 %",
    "train time": "images/s",
    "kWh": "cost",
    "skipped": "val loss",
    "batch": "epochs",
    "ranks": "n",
}
_NARROW_HEADS = {"val loss": "val\nloss", "train time": "time"}
TOKEN_VARIABLE = "PACELINE_WATCH_TOKEN"
_SHORTEST_TOKEN = 12


def report_run(
    run: Path = typer.Argument(help="A run folder."),
    out: Path | None = typer.Option(None, help="Where to write the page. Default: in the run."),
) -> int:
    """Write and summarise the report of a run."""
    print_summary(Console(), run, write_report(run, out))
    return 0


def compare_runs(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run folders, or folders of run folders."
    ),
    baseline: str | None = typer.Option(
        None, metavar="ROW|RUN", help="What differences are to. Default: the first complete row."
    ),
    label: list[str] = typer.Option([], metavar="RUN=NAME", help="Name of the row of RUN."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write a page with charts."),
    as_markdown: bool = typer.Option(False, "--markdown", help="Print the table as Markdown."),
    as_json: AsJson = False,
) -> int:
    """Compare runs: mean and spread over seeds, differences to a baseline."""
    if as_markdown and as_json:
        raise ConfigError("--markdown", None, "cannot be given with --json", "leave out one")
    left_out: list[str] = []
    comparison = Comparison.of(read_runs(runs, left_out), label, baseline, left_out)
    page = None
    if html is not None:
        page = write_page(render_comparison(comparison), html, "compare.html")
    if as_json:
        typer.echo(json.dumps(compare_json(comparison), default=str))
    elif as_markdown:
        typer.echo(compare_markdown(comparison))
    else:
        print_comparison(Console(), comparison)
    if page is not None:
        # Standard output may be a file, or the input of a script.
        typer.echo(f"page: {page}", err=as_json or as_markdown)
    return 0


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Caption, table, notes; in a pipe without a box, and each row on one line."""
    table = compare_table(comparison)
    drawn = _rich_table(table, boxed=console.is_terminal)
    wanted = console.measure(drawn, options=console.options.update(width=10_000)).maximum
    if wanted > console.width:
        if console.is_terminal:
            drawn = _rich_table(_stacked(table), boxed=True)
        else:
            console.width = wanted
    if text := compare_caption(comparison):
        print_line(console, text)
    console.print(drawn)
    for note in comparison.notes:
        print_line(console, note)


def _rich_table(table: Table, *, boxed: bool) -> RichTable:
    drawn = RichTable(
        box=box.SIMPLE_HEAD if boxed else None,
        pad_edge=False,
        show_edge=False,
        collapse_padding=boxed,
    )
    for i, name in enumerate(table.columns):
        if i in table.text_columns:
            drawn.add_column(name, overflow="fold")
        else:  # numbers do not wrap: the labels of the rows do
            drawn.add_column(name, justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))  # not markup: labels may hold brackets
    return drawn


def _stacked(table: Table) -> Table:
    """The same figures in fewer columns and more lines."""
    head = tuple(_NARROW_HEADS.get(name, name) for name in table.columns)
    cells = dict(zip(table.columns, zip(head, *table.rows, strict=True), strict=True))
    for name, above in _BELOW.items():
        if name in cells and above in cells:
            below = cells.pop(name)
            cells[above] = tuple(map("\n".join, zip(cells[above], below, strict=True)))
    if "Δ points" in cells:
        cells["Δ points"] = tuple(cell.replace(" ± ", "\n± ") for cell in cells["Δ points"])
    columns, *rows = zip(*cells.values(), strict=True)
    return replace(table, columns=columns, rows=tuple(rows))


def watch_runs(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run folders, or folders of run folders; they need not exist yet."
    ),
    port: int = typer.Option(PORT, help="Port to listen on; 0 finds a free one.", metavar="N"),
    host: str = typer.Option(
        LOOPBACK, help=f"Address to listen on. Others than loopback need the token, from "
        f"{TOKEN_VARIABLE} or made up and printed.",
    ),
) -> int:  # fmt: skip
    """Serve live reports of runs, finished or not."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise ConfigError(
            TOKEN_VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} letters and digits",
            "leave it out, and a token is made up",
        )  # fmt: skip
    if not is_loopback(host) and not token:
        token = secrets.token_hex(16)
    found = find_runs(runs)
    with WatchServer(runs, open_socket(host, port), token) as server:
        names = ", ".join(path.name for path in found[:5]) + (", …" if len(found) > 5 else "")
        print_line(Console(), f"watching {names} at {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def find_runs(given: Iterable[Path]) -> list[Path]:
    """The run folders that are there now, and folders that are waited for. The server looks again."""
    given = list(given)
    for path in given:
        if path.exists() and not path.is_dir():
            raise DataError(f"{path} is not a folder", "give a run folder")
    found = run_folders(given)
    if len(found) > MAX_RUNS:
        raise ConfigError("RUN", len(found), f"are more than {MAX_RUNS} runs", "name some of them")
    return found
