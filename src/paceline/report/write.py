"""Writes pages: the report of a run beside its records, or any page where it is wanted.

In: a run folder, or a page. Out: an HTML file, whole or not at all: who opens the page while it is
written anew sees the old one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.core.whole_file import whole_file
from paceline.report.html_page import render
from paceline.report.run_files import EVENTS_NAME, RunFiles

REPORT_NAME = "report.html"
_PAGE_SUFFIXES = (".html", ".htm")
_PAGE_BEGINS = b"<!doctype html>"
# What a run folder holds, also before the run has written it.
_RUN_FILES = ("metrics*.jsonl", "*.toml", "*.json", "*.safetensors", "*.pt", "run.lock")


def write_report(
    run_dir: Path, out: Path | None = None, summary: dict[str, Any] | None = None
) -> Path:
    """Writes the report of `run_dir` to `out` (a file, or a folder for it) and returns its path.

    `summary` takes the place of `summary.json`, for a run that writes that file last."""
    target = run_dir / REPORT_NAME if out is None else out
    files = RunFiles.read(run_dir)
    if summary is not None:
        files = replace(files, summary=summary)
    return write_page(render(files), target, REPORT_NAME)


def write_page(page: str, target: Path, name: str) -> Path:
    """Writes `page` to `target`, a file, or a folder in which it is called `name`."""
    try:
        if target.is_dir():
            target = target / name
        _refuse_other_files(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            file.write(page.encode("utf-8"))
    except OSError as error:
        raise DataError(
            f"report {target} cannot be written: {error.strerror}",
            "give another place, or free disk space",
        ) from error
    return target


def _refuse_other_files(target: Path) -> None:
    """A page replaces pages. Records of a run, checkpoints and whatever else is no page stay."""
    if target.suffix.lower() in _PAGE_SUFFIXES:
        return
    in_run = (target.parent / EVENTS_NAME).is_file()
    own = in_run and any(target.match(pattern) for pattern in _RUN_FILES)
    if not own and not _holds_something_else(target):
        return
    what = "is a file of the run" if own else "holds something else than a page"
    raise DataError(f"{target} {what}", "give a name that ends in .html")


def _holds_something_else(target: Path) -> bool:
    if not target.is_file():
        return False
    with target.open("rb") as file:
        head = file.read(len(_PAGE_BEGINS))
    return bool(head) and head.lower() != _PAGE_BEGINS
