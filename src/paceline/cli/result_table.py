"""The table at the end of a run, and of `paceline report`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report.run_files import RunFiles
from paceline.report.text_summary import summary_rows, verdict


def print_summary(console: Console, folder: Path, page: Path) -> None:
    """Verdict, table and the path of the report."""
    run = RunFiles.read(folder)
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for label, value in summary_rows(run):
        table.add_row(label, Text(value))  # a name in brackets is not markup
    console.print(verdict(run), markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    # A path must stay on one line, or nobody can copy it.
    console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
