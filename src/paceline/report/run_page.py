"""The report of a run: one HTML page, and its figures as rows for the terminal.

An unfinished run has a report of what there is so far.
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
    folded,
    list_section,
    section,
)
from paceline.report.outcome import CAUSES, Efficiency, Outcome, verdict
from paceline.report.records import finite, integer, middle
from paceline.report.run_files import EVENTS_NAME, RunFiles

REPORT_NAME = "report.html"
# The figures in large type.
_LARGE = ("top-1", "top-5", "images/s", "training time", "time to target")
# No line break between a number and its unit.
_UNIT_GAP = re.compile(r"(?<=\d) (?=(?:%|s|min|h|images/s|ranks?)(?!\w))")
# A part of the start-up that takes less is not named.
_NOTABLE_SHARE = 0.02
# Style classes of the causes in the bar.
_LOOKS = ("c1", "c2", "c4", "c8", "c5", "c6", "rest")
# A larger confusion matrix takes the whole width.
_HALF_PAGE_CLASSES = 10
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
    return document(verdict(run), run_parts(run))


def run_parts(run: RunFiles) -> list[str]:
    """The parts of the page, some of them empty."""
    results = tables.result_rows(run)
    large = {*_LARGE, *(own.label for own in Outcome.of(run).figures if own.axis)}
    incidents = [tables.resume_table(run), tables.skipped_table(run), tables.corrupt_table(run)]
    files_and_ranks = [
        tables.checkpoint_table(run), tables.save_table(run), tables.rank_table(run)
    ]  # fmt: skip
    return [
        _header(run),
        efficiency_section(run),
        definition_list([row for row in results if row[0] in large], "tiles"),
        definition_list([row for row in results if row[0] not in large], "facts"),
        figures(run_charts(run)),
        _loss_note(run),
        _logged_section(run),
        section("Predicted and measured", [tables.expectation_table(run)]),
        section("Waiting for the input", [tables.stall_table(run)]),
        section("Counts", tables.count_tables(run), titled=True),
        section("Evaluations", [tables.epoch_table(run)]),
        _mistakes_section(run),
        section("Incidents", incidents, titled=True),
        list_section("Notes", notes(run)[: tables.MAX_ROWS]),
        section("Files and ranks", files_and_ranks, titled=True),
        _configuration(run),
        card_section("Environment", tables.environment_tables(run), "unknown until the run ends"),
        _footer(run),
    ]


def efficiency_section(run: RunFiles, *, heading: bool = True) -> str:
    """T = S · N · e, what bounds the steps, and a bar of what e was lost to."""
    found = Efficiency.of(run)
    if found is None:
        return ""
    terms = [
        ("T, images/s", rate(found.total)),
        ("S, images/s of one rank", rate(found.alone)),
        ("N, ranks", count(found.ranks)),
        ("e, efficiency", format_percent(100 * found.e, 1)),
    ]
    parts = [("used", found.e, "used")]
    parts += [(cause, found.lost[cause], look) for cause, look in zip(CAUSES, _LOOKS, strict=True)]
    most = found.largest_loss
    lost = f". Most of e was lost to {most} ({100 * found.lost[most]:.0f} %)" if most else ""
    bound, told = bound_by(run), ""
    if bound:
        named = f"Steps are bound by <strong>{markup(bound)}</strong>{markup(lost)}."
        told = f'<p class="bound">{named}</p>'
    title = "<h2>T = S · N · e</h2>\n" if heading else ""
    return (
        f'<section class="efficiency">{title}{definition_list(terms, "formula")}\n'
        f"{share_bar('where the time went', parts)}\n{told}</section>"
    )


def _logged_section(run: RunFiles) -> str:
    """What callbacks have logged."""
    table = section("Logged metrics", [tables.logged_table(run)])
    return table + figures(logged_charts(run)) if table else ""


def _loss_note(run: RunFiles) -> str:
    reasons = why_training_loss_is_higher(run)
    if not reasons:
        return ""
    return (
        '<p class="note">The training loss lies above the validation loss: '
        f"{markup('; '.join(reasons))}.</p>"
    )


def why_training_loss_is_higher(run: RunFiles) -> list[str]:
    """What raises the training loss and not the validation loss; empty where it is not higher."""
    validation = run.eval_curve("loss")
    if not len(validation):
        return []
    last, before = validation.step[-1], validation.step[-2] if len(validation) > 1 else 0
    steps = run.steps()
    training = middle(steps["loss"][(before < steps.number) & (steps.number <= last)])
    if training is None or training <= validation.value[-1]:
        return []
    settings = dict(tables.flat(run.config))
    reasons = []
    smoothing = finite(settings, "run.smoothing") or 0.0
    if smoothing > 0 and settings.get("run.loss", "cross_entropy") in ("cross_entropy", "bce"):
        floor = _smoothing_floor(smoothing, run) if settings.get("run.loss") != "bce" else None
        least = "" if floor is None else f", which adds up to {floor:.3f}"
        reasons.append(f"label smoothing {smoothing:g} is part of the training loss only{least}")
    for name in ("mixup", "cutmix"):
        if (finite(settings, f"run.{name}") or 0.0) > 0:
            reasons.append(f"{name} mixes the training images only")
    augment = settings.get("data.augment")
    if isinstance(augment, str) and augment not in ("", "none"):
        reasons.append(f"training images are augmented ({text_of(augment)}), validation images not")
    if (finite(settings, "run.average_epochs") or 0.0) > 0:
        reasons.append("evaluations use the averaged weights")
    reasons.append("a training loss is measured before its update, while the weights still improve")
    return reasons


def _smoothing_floor(smoothing: float, run: RunFiles) -> float | None:
    """The cross-entropy of a perfect prediction with smoothed labels: their entropy."""
    evaluation = Evaluation.read(run.path)
    classes = len(evaluation.classes) if evaluation else run.classes
    if not 2 <= classes <= 10**6:
        return None
    rest = smoothing / classes
    top = 1 - smoothing + rest
    return -top * math.log(top) - (classes - 1) * rest * math.log(rest)


def _mistakes_section(run: RunFiles) -> str:
    found = Evaluation.read(run.path)
    if found is None:
        return ""
    matrix, gallery = found.matrix(), found.gallery()
    pictures = ""
    if matrix:
        caption = "Confusion matrix <span>images; a row for each class</span>"
        whole = ' class="whole"' if len(found.classes) > _HALF_PAGE_CLASSES else ""
        pictures += f"<figure{whole}><figcaption>{caption}</figcaption>{matrix}</figure>"
    if gallery:
        pictures += f"<figure><figcaption>Most confident mistakes</figcaption>{gallery}</figure>"
    shown = [found.class_table(), found.confusion_table()]
    head = f"Classes, at step {count(found.step)}"
    charts = f'<section class="charts">{pictures}</section>' if pictures else ""
    return section(head, shown, titled=True) + charts


def _configuration(run: RunFiles) -> str:
    """What was changed stands before everything else."""
    changed = tables.changed_table(run)
    everything = card_section("Configuration", tables.configuration_tables(run), "no config.toml")
    if not changed.rows:
        return everything
    return section("Changed settings", [changed]) + "\n" + folded("All settings", everything)


def _startup(run: RunFiles) -> str:
    """From the command to the end of the first step, by part, of the latest start; empty where its record
    has no parts, or no step followed."""
    parts, begun = run.start.get("startup_s"), finite(run.start, "time")
    steps, before = run.steps(), integer(run.start, "step") or 0
    first = steps["time"][steps.number == before + 1]
    if not isinstance(parts, dict) or not parts or begun is None or not len(first):
        return ""
    seconds = {text_of(name): finite(parts, name) or 0.0 for name in parts}
    seconds["first step"] = float(first[0]) - begun
    whole = sum(seconds.values())
    if (
        not 0 < whole < math.inf or min(seconds.values()) < 0
    ):  # the clock was set, or a record made up
        return ""
    named = [
        f"{name} {took:.1f}" for name, took in seconds.items() if took >= _NOTABLE_SHARE * whole
    ]
    return f"{whole:.1f} s: {', '.join(named)}"


def summary_rows(run: RunFiles) -> list[tuple[str, str]]:
    """(label, value) rows for the end of `paceline train` and for `paceline report`."""
    rows = [("run", Outcome.of(run).name), *tables.result_rows(run)]
    if startup := _startup(run):
        rows.append(("to the first step", startup))
    if stall := InputStall.of(run).describe():
        rows.append(("waiting for the input", stall))
    if bottleneck := bound_by(run):
        rows.append(("bound by", bottleneck))
    if efficiency := Efficiency.of(run):
        rows.append(("T = S · N · e", efficiency.describe()))
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
