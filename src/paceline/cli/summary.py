"""The table that `paceline train` and `paceline report` print at their end."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.report import RunFiles, summary_rows, verdict
from paceline.train.display import print_line


def print_summary(console: Console, folder: Path, page: Path) -> None:
    """Prints the verdict, the table and the path of the report."""
    run = RunFiles.read(folder)
    table = Table(show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for label, value in summary_rows(run):
        table.add_row(label, Text(value))  # names may contain brackets, which are markup
    print_line(console, verdict(run))
    console.print(table)
    print_line(console, f"report: {page}")
