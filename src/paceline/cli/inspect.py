"""`paceline inspect DIR`: what a data set holds, and whether all of it is well."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.core.errors import ConfigError
from paceline.core.untrusted import one_line


def inspect_data(
    directory: str = typer.Argument("", help="A directory that --data-dir would take."),
    source: str = typer.Option("auto", help="Kind of data, as data.source."),
    split: str = typer.Option("all", help="all, train or val."),
    sample: int = typer.Option(256, min=0, help="Images of each split to decode."),
    everything: bool = typer.Option(False, "--all", help="Decode every image."),
    checksums: bool = typer.Option(True, help="Compare the shards' SHA-256 with the manifest."),
    sheet: Path | None = typer.Option(None, help="Write a contact sheet (PNG) to this file."),
    sheet_images: int = typer.Option(100, min=1, max=1000, help="Thumbnails on the sheet."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on standard output."),
    workers: int | None = typer.Option(None, min=0, help="Threads. Default: a core each."),
) -> int:
    """Count and check a data set; exit code 1 where something is wrong with it."""
    from paceline.cli.progress_bars import ProgressBars
    from paceline.core.cores import available_cores
    from paceline.data.inspection.inspect_set import inspect_set

    if sheet is not None and (not sheet.name or sheet.is_dir()):
        shown = "" if str(sheet) == "." else str(sheet)
        raise ConfigError("--sheet", shown, "is not a file", "give the name of a PNG file")
    with ProgressBars() as bars:
        report = inspect_set(
            directory,
            source,
            split,
            look_at=None if everything else sample,
            checksums=checksums,
            workers=available_cores() if workers is None else workers,
            sheet=(sheet, sheet_images) if sheet is not None else None,
            on_progress=bars.update,
        )
    if as_json:
        typer.echo(json.dumps(report.table()))
        return 1 if report.problems else 0
    for name, facts in report.splits.items():
        _print_table(name, facts.table())
    for note in report.notes:
        typer.echo(one_line(f"note: {note}"))
    for problem in report.problems:
        typer.echo(one_line(f"problem: {problem}"))
    if not report.problems:
        typer.echo("no problem found")
    return 1 if report.problems else 0


def _print_table(name: str, facts: dict[str, object]) -> None:
    table = Table(title=name, show_header=False, title_justify="left")
    for label, value in facts.items():
        if label != "corrupt":
            # Neither markup nor escape sequences: the name of a class may hold both.
            table.add_row(label.replace("_", " "), Text(one_line(_text(value))))
    Console().print(table)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
