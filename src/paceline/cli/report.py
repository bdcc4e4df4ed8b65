"""`paceline report`, `compare` and `watch`: pages and tables of runs, without torch."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import typer
from rich.console import Console

from paceline.cli.options import AsJson
from paceline.cli.summary import print_summary, rich_table, widen_pipe
from paceline.core.errors import ConfigError, DataError
from paceline.report import write_page, write_report
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
    """Prints caption, table and notes. In a pipe, the table has no box, and each row is one line."""
    drawn = rich_table(compare_table(comparison), boxed=console.is_terminal)
    widen_pipe(console, [drawn])
    if text := compare_caption(comparison):
        print_line(console, text)
    console.print(drawn)
    for note in comparison.notes:
        print_line(console, note)


def watch_runs(
    runs: list[Path] = typer.Argument(
        metavar="RUN", help="Run folders, or folders of run folders; they need not exist yet."
    ),
    port: int = typer.Option(PORT, help="Port to listen on; 0 finds a free one.", metavar="N"),
    host: str = typer.Option(
        LOOPBACK, help="Address to listen on. Addresses other than loopback need a token: "
        f"{TOKEN_VARIABLE}, or a random one that is printed.",
    ),
) -> int:  # fmt: skip
    """Serve live reports of runs, finished or not."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and (len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise ConfigError(
            TOKEN_VARIABLE, None, f"must have at least {_SHORTEST_TOKEN} letters and digits",
            "unset it for a random token",
        )  # fmt: skip
    if not is_loopback(host) and not token:
        token = secrets.token_hex(16)
    folders = find_runs(runs)
    with WatchServer(runs, open_socket(host, port), token) as server:
        names = ", ".join(path.name for path in folders[:5]) + (", …" if len(folders) > 5 else "")
        print_line(Console(), f"watching {names} at {server.url} (Ctrl-C ends)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def find_runs(given: Iterable[Path]) -> list[Path]:
    """Returns all run folders in `given`.

    A given folder that has no runs, or does not exist, is returned as it is.
    """
    given = list(given)
    for path in given:
        if path.exists() and not path.is_dir():
            raise DataError(f"{path} is not a folder", "give a run folder")
    folders = run_folders(given)
    if len(folders) > MAX_RUNS:
        problem = f"are more than {MAX_RUNS} runs"
        raise ConfigError("RUN", len(folders), problem, "name some of them")
    return folders
