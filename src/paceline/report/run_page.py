"""The report of a run: one HTML page that needs nothing beside it.

In: a `RunFiles`. Out: the page as text, with its style and charts inline, no script, nothing to
load, every name escaped. An unfinished run gives a page of what there is.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.core.whole_file import whole_file
from paceline.report import tables
from paceline.report.expectation import InputStall, bound_by, expectation_table, stall_table
from paceline.report.html import document, figures, html_pairs, html_table, remarks, section
from paceline.report.outcome import Outcome
from paceline.report.quantities import (
    count,
    duration,
    loss,
    many,
    markup,
    moment,
    number,
    percent,
    rate,
    shown,
)
from paceline.report.run_charts import run_charts
from paceline.report.run_files import EVENTS_NAME, RunFiles, finite
from paceline.report.tables import Table, median_of, result_rows

# What a reader came for; the other figures stand below in small.
_LARGE = ("top-1", "top-5", "images/s", "training time", "time to target")

# A line must not break between a number and its unit.
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:%|s|min|h|images/s|ranks?)(?!\w))")


def render(run: RunFiles) -> str:
    """The whole page."""
    return document(verdict(run), _parts(run))


def _parts(run: RunFiles) -> list[str]:
    results = tables.result_rows(run)
    return [
        _header(run),
        html_pairs([row for row in results if row[0] in _LARGE], "tiles"),
        html_pairs([row for row in results if row[0] not in _LARGE], "facts"),
        figures(run_charts(run)),
        section("Predicted and measured", [expectation_table(run)]),
        section("Waiting for the input", [stall_table(run)]),
        section("Evaluations", [tables.epoch_table(run)]),
        section(
            "Incidents",
            [
                resume_table(run),
                skipped_table(run),
                corrupt_table(run),
            ],
            titled=True,
        ),
        remarks("Remarks", notes(run)[: tables.MAX_ROWS]),
        section(
            "Files and ranks",
            [checkpoint_table(run), rank_table(run)],
            titled=True,
        ),
        _cards("Configuration", tables.configuration_tables(run), "config.toml is not there"),
        _cards("Environment", tables.environment_tables(run), "known once the run has ended"),
        _footer(run),
    ]


def _header(run: RunFiles) -> str:
    outcome = Outcome.of(run)
    starts = run.of_kind("start")
    began = moment(finite(starts[0], "time")) if starts else "not started"
    model = (run.summary or {}).get("model")
    facts = [shown(run.path.resolve().name), began, *([shown(model)] if model else [])]
    title = _UNIT_GAP.sub("&nbsp;", markup(verdict(run)))
    return (
        f'<header><p><span class="state {outcome.state}">{outcome.state}</span>'
        f"{markup(' · '.join(facts))}</p>\n<h1>{title}</h1></header>"
    )


def _cards(title: str, content: list[Table], otherwise: str) -> str:
    """Small tables side by side."""
    filled = [f'<div class="card">{html_table(table)}</div>' for table in content if table.rows]
    body = f'<p class="note">{markup(otherwise)}</p>'
    if filled:
        body = '<div class="cards">' + "\n".join(filled) + "</div>"
    return f"<section><h2>{markup(title)}</h2>\n{body}</section>"


def _footer(run: RunFiles) -> str:
    digest = (run.summary or {}).get("weights_sha256")
    weights = f" · weights sha256 {markup(shown(digest))}" if digest else ""
    averaged = (run.summary or {}).get("average_sha256")
    average = f" · their average {markup(shown(averaged))}" if averaged else ""
    return f"<footer>Paceline run report{weights}{average}</footer>"


# Tables of what happened on the way: resumes, skipped steps, corrupt samples, checkpoints, ranks.
#
# In: a `RunFiles`. Out: `Table`s; one without rows where nothing of the kind happened.


def corrupt_table(run: RunFiles) -> Table:
    """Samples that could not be decoded, each once, where it was first met."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for rank in run.ranks:
        for record in run.of_kind("corrupt", rank):
            what = (record["step"], rank, shown(record.get("reason")))
            found.setdefault(shown(record.get("name")), []).append(what)
    rows = [
        (name, min(times)[2], count(min(times)[0]), str(min(times)[1]))
        for name, times in sorted(found.items(), key=lambda item: min(item[1]))
    ]
    columns = ("sample", "reason", "first at step", "on rank")
    return Table.of("Corrupt samples", columns, rows, {0, 1})


def checkpoint_table(run: RunFiles) -> Table:
    """Checkpoints, the latest first."""
    rows = [
        (
            shown(record.get("path")),
            count(record["step"]),
            duration(finite(record, "save_s")),
            "best so far" if record.get("best") is True else "",
        )
        for record in reversed(run.of_kind("checkpoint"))
    ]
    return Table.of("Checkpoints", ("file", "step", "saved in", ""), rows, {0, 3}, max_rows=12)


def skipped_table(run: RunFiles) -> Table:
    """Steps whose gradient was not finite on some rank, so that no rank took them."""
    rows = [
        (count(record["step"]), number(finite(record, "epoch")), loss(finite(record, "loss")))
        for record in run.of_kind("step")
        if record.get("skipped") is True
    ]
    return Table.of("Skipped steps", ("step", "epoch", "loss"), rows, set())


def resume_table(run: RunFiles) -> Table:
    """Where the run was taken up again, and from what."""
    rows = [
        (
            moment(finite(record, "time")),
            count(record["step"]),
            shown(record.get("resumed_from")),
            many(int(finite(record, "world_size") or 0), "rank"),
        )
        for record in run.resumes
    ]
    return Table.of("Resumes", ("when", "at step", "from", "on"), rows, {0, 2})


def rank_table(run: RunFiles) -> Table:
    """Pace of each rank: a slow disk or device shows here. Empty where one rank alone reports."""
    steps = {rank: run.of_kind("step", rank) for rank in run.ranks}
    rows = [
        (
            str(rank),
            count(len(records)),
            duration(median_of(records, "step_s")),
            duration(median_of(records, "data_s")),
        )
        for rank, records in steps.items()
        if records
    ]
    columns = ("rank", "records", "median step", "of it waiting for data")
    return Table.of("Ranks", columns, rows if len(rows) > 1 else [], set())


def notes(run: RunFiles) -> list[str]:
    """What the run remarked, each remark once."""
    return list(dict.fromkeys(shown(record.get("text")) for record in run.of_kind("note")))


# The run in a few plain rows, for the end of `paceline train` and for `paceline report`.
#
# In: a `RunFiles`. Out: one line of verdict and rows of (label, value), without markup or control
# characters; how they are set is the command line's business.


def summary_rows(run: RunFiles) -> list[tuple[str, str]]:
    """The result table, with the recipe's name on top."""
    rows = [("run", Outcome.of(run).name), *result_rows(run)]
    verdict = bound_by(run)
    stall = InputStall.of(run)
    rows += [("waiting for the input", stall.describe())] if stall.steps else []
    rows += [("bound by", verdict)] if verdict else []
    for part, predicted, measured, apart in expectation_table(run).rows:
        rows.append((f"{part}, predicted", f"{predicted} ms; measured {measured} ms ({apart})"))
    return rows


def verdict(run: RunFiles) -> str:
    """`quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank`, or how far the run has come."""
    outcome = Outcome.of(run)
    result = _result(outcome)
    if outcome.state == "finished":
        target = "target reached, " if outcome.stopped_by == "target" else ""
        return f"{outcome.name}: {target}{result or 'finished without an evaluation'}"
    where = f"at step {count(outcome.steps)}"
    if outcome.total_steps:
        share = 100 * outcome.steps / outcome.total_steps
        where += f" of {count(outcome.total_steps)} ({percent(share, 0)})"
    if outcome.state == "stopped":
        state = f"stopped by {outcome.stopped_by} {where}"
    elif outcome.steps:
        state = f"unfinished, {where}"
    else:
        state = "unfinished, no step recorded yet"
    return f"{outcome.name}: {state}" + (f"; so far {result}" if result else "")


def _result(outcome: Outcome) -> str:
    """Accuracy, time, speed and ranks, as far as they are known."""
    accuracy = None if outcome.top1 is None else f"{percent(outcome.top1, 1)} top-1"
    time = None if outcome.train_s is None or not outcome.steps else duration(outcome.train_s)
    parts = []
    if accuracy or time:
        parts.append(" in ".join(part for part in (accuracy, time) if part))
    if outcome.images_per_s is not None:
        ranks = f" on {many(outcome.world_size, 'rank')}" if outcome.world_size else ""
        parts.append(f"{rate(outcome.images_per_s)} images/s{ranks}")
    return ", ".join(parts)


# Writes pages: the report of a run beside its records, or any page where it is wanted.
#
# In: a run folder, or a page. Out: an HTML file, whole or not at all: who opens the page while it
# is written anew sees the old one.


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
