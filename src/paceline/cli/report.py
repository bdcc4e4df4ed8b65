"""`paceline report RUN`: the page and the table of a run, finished or not. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console


def report_run(
    run: Path = typer.Argument(help="A run folder."),
    out: Path | None = typer.Option(None, help="Where to write the page. Default: in the run."),
) -> int:
    """Write and summarise the report of a run."""
    from paceline.cli.result_table import print_summary
    from paceline.report.write import write_report

    page = write_report(run, out)
    print_summary(Console(), run, page)
    return 0
