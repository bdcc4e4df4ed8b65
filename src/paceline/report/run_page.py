"""The report of a run: one HTML page, and its figures as rows for the terminal.

An unfinished run has a report of what there is so far.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.core.files import whole_file
from paceline.report import tables
from paceline.report.bottleneck import InputStall, bound_by
from paceline.report.html import (
    card_section,
    definition_list,
    document,
    figures,
    list_section,
    section,
)
from paceline.report.outcome import Outcome, verdict
from paceline.report.quantities import date, markup, text_of
from paceline.report.run_charts import run_charts
from paceline.report.run_files import EVENTS_NAME, RunFiles, finite

REPORT_NAME = "report.html"
# The figures in large type.
_LARGE = ("top-1", "top-5", "images/s", "training time", "time to target")
# No line break between a number and its unit.
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:%|s|min|h|images/s|ranks?)(?!\w))")
_PAGE_SUFFIXES = (".html", ".htm")
_PAGE_BEGINS = b"<!doctype html>"
# The files of a run folder, including those that the run has yet to write.
_RUN_FILES = ("metrics*.jsonl", "*.toml", "*.json", "*.safetensors", "*.pt", "run.lock")


def write_report(
    run_dir: Path, out: Path | None = None, summary: dict[str, Any] | None = None
) -> Path:
    """Writes the report of `run_dir` to `out` (a file, or a folder for it) and returns its path.

    `summary` replaces `summary.json`: a run writes that file last."""
    target = run_dir / REPORT_NAME if out is None else out
    files = RunFiles.read(run_dir)
    if summary is not None:
        files = replace(files, summary=summary)
    return write_page(render_run(files), target, REPORT_NAME)


def render_run(run: RunFiles) -> str:
    """The report of a run as one page."""
    results = tables.result_rows(run)
    incidents = [tables.resume_table(run), tables.skipped_table(run), tables.corrupt_table(run)]
    files_and_ranks = [tables.checkpoint_table(run), tables.rank_table(run)]
    return document(
        verdict(run),
        [
            _header(run),
            definition_list([row for row in results if row[0] in _LARGE], "tiles"),
            definition_list([row for row in results if row[0] not in _LARGE], "facts"),
            figures(run_charts(run)),
            section("Predicted and measured", [tables.expectation_table(run)]),
            section("Waiting for the input", [tables.stall_table(run)]),
            section("Evaluations", [tables.epoch_table(run)]),
            section("Incidents", incidents, titled=True),
            list_section("Notes", notes(run)[: tables.MAX_ROWS]),
            section("Files and ranks", files_and_ranks, titled=True),
            card_section("Configuration", tables.configuration_tables(run), "no config.toml"),
            card_section(
                "Environment", tables.environment_tables(run), "unknown until the run ends"
            ),
            _footer(run),
        ],
    )


def summary_rows(run: RunFiles) -> list[tuple[str, str]]:
    """(label, value) rows for the end of `paceline train` and for `paceline report`."""
    rows = [("run", Outcome.of(run).name), *tables.result_rows(run)]
    if stall := InputStall.of(run).describe():
        rows.append(("waiting for the input", stall))
    if bottleneck := bound_by(run):
        rows.append(("bound by", bottleneck))
    for part, predicted, measured, apart in tables.expectation_table(run).rows:
        rows.append((f"{part}, predicted", f"{predicted} ms; measured {measured} ms ({apart})"))
    return rows


def notes(run: RunFiles) -> list[str]:
    """The notes of the run, each once."""
    return list(dict.fromkeys(text_of(record.get("text")) for record in run.of_kind("note")))


def _header(run: RunFiles) -> str:
    state, starts = Outcome.of(run).state, run.of_kind("start")
    began = date(finite(starts[0], "time")) if starts else "not started"
    model = (run.summary or {}).get("model")
    facts = [text_of(run.path.resolve().name), began, *([text_of(model)] if model else [])]
    title = _UNIT_GAP.sub("&nbsp;", markup(verdict(run)))
    return (
        f'<header><p><span class="state {state}">{state}</span>'
        f"{markup(' · '.join(facts))}</p>\n<h1>{title}</h1></header>"
    )


def _footer(run: RunFiles) -> str:
    parts = ["Paceline run report"]
    for label, field in (("weights", "weights_sha256"), ("averaged weights", "average_sha256")):
        if digest := (run.summary or {}).get(field):
            parts.append(f"{label} sha256 {text_of(digest)}")
    return f"<footer>{markup(' · '.join(parts))}</footer>"


def write_page(page: str, target: Path, name: str) -> Path:
    """Writes `page` to `target`, a file, or a folder in which it is called `name`.

    Atomic: readers see the old page or the new one."""
    try:
        if target.is_dir():
            target = target / name
        _check_target(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            file.write(page.encode("utf-8"))
    except OSError as error:
        raise DataError(
            f"report {target} cannot be written: {error.strerror}",
            "choose another path, or free disk space",
        ) from error
    return target


def _check_target(target: Path) -> None:
    """A page replaces pages only, never records, checkpoints or other files."""
    if target.suffix.lower() in _PAGE_SUFFIXES:
        return
    problem = ""
    if (target.parent / EVENTS_NAME).is_file() and any(map(target.match, _RUN_FILES)):
        problem = "is a file of the run"
    elif target.is_file():
        with target.open("rb") as file:
            head = file.read(len(_PAGE_BEGINS))
        if head and head.lower() != _PAGE_BEGINS:
            problem = "exists and is not a page"
    if problem:
        raise DataError(f"{target} {problem}", "give a name that ends in .html")
