"""The report of a run: an HTML page, and the main results as rows for the terminal.

A run that has not ended gets a report of its results so far.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.core.files import whole_file
from paceline.core.units import count, date, format_percent, markup, rate, text_of
from paceline.report import tables
from paceline.report.bottleneck import InputStall, bound_by
from paceline.report.chart import share_bar
from paceline.report.curves import logged_charts, run_charts
from paceline.report.evaluation import Evaluation
from paceline.report.html import (
    card_section,
    definition_list,
    document,
    figures,
    list_section,
    section,
)
from paceline.report.outcome import CAUSES, Efficiency, Outcome, verdict
from paceline.report.records import finite, integer
from paceline.report.run_files import EVENTS_NAME, RunFiles

REPORT_NAME = "report.html"
# The results that the page shows in large type.
_LARGE = ("top-1", "top-5", "images/s", "training time", "time to target")
# Matches the space between a number and its unit, where a line break would be ugly.
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:%|s|min|h|images/s|ranks?)(?!\w))")
# Smaller parts of the start-up are not shown.
_NOTABLE_SHARE = 0.02
# Style classes of `CAUSES` in the bar.
_LOOKS = ("c1", "c2", "c4", "c8", "c5", "c6", "rest")
_PAGE_SUFFIXES = (".html", ".htm")
_PAGE_BEGINS = b"<!doctype html>"
# The files of a run folder, including those that the run writes later.
_RUN_FILES = ("metrics*.jsonl", "*.toml", "*.json", "*.safetensors", "*.pt", "run.lock")


def write_report(
    run_dir: Path, out: Path | None = None, summary: dict[str, Any] | None = None
) -> Path:
    """Writes the report of a run.

    Args:
        run_dir: The run folder.
        out: The file to write, or a folder that receives `report.html`; the run folder by default.
        summary: A summary that replaces `summary.json`, which a run writes only after its report.

    Returns:
        The path of the page.

    Raises:
        DataError: If the run cannot be read, or the page cannot be written.
    """
    target = run_dir / REPORT_NAME if out is None else out
    files = RunFiles.read(run_dir)
    if summary is not None:
        files = replace(files, summary=summary)
    return write_page(render_run(files), target, REPORT_NAME)


def render_run(run: RunFiles) -> str:
    """Returns the report of a run as one page."""
    return document(verdict(run), run_parts(run))


def run_parts(run: RunFiles) -> list[str]:
    """Returns the HTML parts of the report; a part is "" if the run has no data for it."""
    results = tables.result_rows(run)
    large = {*_LARGE, *(figure.label for figure in Outcome.of(run).figures if figure.axis)}
    incidents = [
        tables.resume_table(run), tables.loss_table(run), tables.skipped_table(run),
        tables.corrupt_table(run),
    ]  # fmt: skip
    return [
        _header(run),
        efficiency_section(run),
        definition_list([row for row in results if row[0] in large], "tiles"),
        definition_list([row for row in results if row[0] not in large], "facts"),
        figures(run_charts(run)),
        _logged_section(run),
        section("Predicted and measured", [tables.expectation_table(run)]),
        section("Waiting for the input", [tables.stall_table(run)]),
        section("Counts", tables.count_tables(run), titled=True),
        section("Evaluations", [tables.epoch_table(run)]),
        _mistakes_section(run),
        section("Incidents", incidents, titled=True),
        list_section("Notes", notes(run)[: tables.MAX_ROWS]),
        section("Files and ranks", [tables.save_table(run), tables.rank_table(run)], titled=True),
        _configuration(run),
        card_section("Environment", tables.environment_tables(run), "unknown until the run ends"),
        _footer(run),
    ]


def efficiency_section(run: RunFiles, *, heading: bool = True) -> str:
    """Builds the section on throughput T = S · N · e, with the bottleneck and the causes of lost time."""
    efficiency = Efficiency.of(run)
    if efficiency is None:
        return ""
    terms = [
        ("T, images/s", rate(efficiency.total)),
        ("S, images/s of one rank", rate(efficiency.alone)),
        ("N, ranks", count(efficiency.ranks)),
        ("e, efficiency", format_percent(100 * efficiency.e, 1)),
    ]
    lost = efficiency.lost
    parts = [("used", efficiency.e, "used")]
    parts += [(cause, lost[cause], look) for cause, look in zip(CAUSES, _LOOKS, strict=True)]
    bottleneck, sentence = bound_by(run), ""
    if bottleneck:
        most = efficiency.largest_loss
        largest = f". Most of e was lost to {most} ({100 * lost[most]:.0f} %)" if most else ""
        sentence = (
            f'<p class="bound">Steps are bound by <strong>{markup(bottleneck)}</strong>'
            f"{markup(largest)}.</p>"
        )
    title = "<h2>T = S · N · e</h2>\n" if heading else ""
    return (
        f'<section class="efficiency">{title}{definition_list(terms, "formula")}\n'
        f"{share_bar('where the time went', parts)}\n{sentence}</section>"
    )


def _logged_section(run: RunFiles) -> str:
    table = section("Logged metrics", [tables.logged_table(run)])
    return table + figures(logged_charts(run)) if table else ""


def _mistakes_section(run: RunFiles) -> str:
    """Builds the section with accuracy by class, confusions and the most confident mistakes."""
    evaluation = Evaluation.read(run.path)
    if evaluation is None:
        return ""
    head = f"Classes, at step {count(evaluation.step)}"
    shown = section(head, [evaluation.class_table(), evaluation.confusion_table()], titled=True)
    if gallery := evaluation.gallery():
        figure = f"<figure><figcaption>Most confident mistakes</figcaption>{gallery}</figure>"
        shown += f'<section class="charts">{figure}</section>'
    return shown


def _configuration(run: RunFiles) -> str:
    """Builds a table of the changed settings and, in a folded section, tables of all settings."""
    changed = tables.changed_table(run)
    everything = card_section("Configuration", tables.configuration_tables(run), "no config.toml")
    if not changed.rows:
        return everything
    folded = f"<details><summary>All settings</summary>\n{everything}</details>"
    return section("Changed settings", [changed]) + "\n" + folded


def _startup(run: RunFiles) -> str:
    """Describes how long each part of the latest start took, up to the end of the first step.

    The result is empty if the start record has no `startup_s`, or if no step followed.
    """
    parts, started = run.start.get("startup_s"), finite(run.start, "time")
    steps, before = run.steps(), integer(run.start, "step") or 0
    first = steps["time"][steps.number == before + 1]
    if not isinstance(parts, dict) or not parts or started is None or not len(first):
        return ""
    seconds = {text_of(name): finite(parts, name) or 0.0 for name in parts}
    seconds["first step"] = float(first[0]) - started
    whole = sum(seconds.values())
    if not 0 < whole < math.inf or min(seconds.values()) < 0:  # the clock was changed
        return ""
    named = [
        f"{name} {took:.1f}" for name, took in seconds.items() if took >= _NOTABLE_SHARE * whole
    ]
    return f"{whole:.1f} s: {', '.join(named)}"


def summary_rows(run: RunFiles) -> list[tuple[str, str]]:
    """Returns the (label, value) pairs that `paceline train` and `paceline report` print."""
    rows = [("run", Outcome.of(run).name), *tables.result_rows(run)]
    if startup := _startup(run):
        rows.append(("to the first step", startup))
    if stall := InputStall.of(run).describe():
        rows.append(("waiting for the input", stall))
    if bottleneck := bound_by(run):
        rows.append(("bound by", bottleneck))
    if efficiency := Efficiency.of(run):
        rows.append(("T = S · N · e", efficiency.describe()))
    for part, predicted, measured, difference in tables.expectation_table(run).rows:
        text = f"{predicted} ms; measured {measured} ms ({difference})"
        rows.append((f"{part}, predicted", text))
    return rows


def notes(run: RunFiles) -> list[str]:
    """Returns the distinct notes of a run."""
    return list(dict.fromkeys(text_of(record.get("text")) for record in run.of_kind("note")))


def _header(run: RunFiles) -> str:
    state, starts = Outcome.of(run).state, run.of_kind("start")
    began = date(finite(starts[0], "time")) if starts else "not started"
    model = (run.summary or {}).get("model")
    facts = [text_of(run.path.resolve().name), began, *([text_of(model)] if model else [])]
    title = _UNIT_GAP.sub("&nbsp;", markup(verdict(run)))
    command = run.start.get("command")
    typed = f"\n<p><code>{markup(text_of(command))}</code></p>" if command else ""
    return (
        f'<header><p><span class="state {state}">{state}</span>'
        f"{markup(' · '.join(facts))}</p>\n<h1>{title}</h1>{typed}</header>"
    )


def _footer(run: RunFiles) -> str:
    parts = ["Paceline run report"]
    for label, field in (("weights", "weights_sha256"), ("averaged weights", "average_sha256")):
        if digest := (run.summary or {}).get(field):
            parts.append(f"{label} sha256 {text_of(digest)}")
    return f"<footer>{markup(' · '.join(parts))}</footer>"


def write_page(page: str, target: Path, name: str) -> Path:
    """Writes a page atomically: readers see the old page or the new one.

    Args:
        page: The HTML text.
        target: The file to write, or an existing folder for the file.
        name: The name of the file if `target` is a folder.

    Returns:
        The path of the file.

    Raises:
        DataError: If `target` is an existing file that is no page, or cannot be written.
    """
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
    """Raises DataError if writing would replace a file that is no page, such as a checkpoint."""
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
