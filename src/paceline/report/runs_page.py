"""The page of several runs: a table to sort and filter, their curves in the same charts, and a card each.

`watch.js` sorts and filters: rows, lines and cards of a run have its number as `data-run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.units import (
    UNKNOWN,
    count,
    format_duration,
    format_percent,
    loss,
    markup,
    plural,
    rate,
)
from paceline.report.chart import XY, Chart, Line
from paceline.report.compare_page import series_look
from paceline.report.compare_runs import SEED, settings_of
from paceline.report.comparison import (
    differing_settings,
    naming_settings,
    short_names,
    value_text,
)
from paceline.report.curves import moving_median, spans_decades, thin
from paceline.report.html import figures, scrolled
from paceline.report.live_run import LiveRun
from paceline.report.outcome import Outcome, verdict
from paceline.report.records import middle
from paceline.report.run_files import Curve, RunFiles, computed_once
from paceline.report.run_page import efficiency_section

# Points of a line: a page of many runs stays small.
_MOST_POINTS = 150
# Charts of more runs show no values when the pointer is over them.
_MOST_NAMED = 12


@dataclass(frozen=True)
class _Curves:
    """What the charts show of a run, by epoch."""

    top1: list[XY]
    loss: list[XY]
    val_loss: list[XY]
    lr: list[XY]

    @classmethod
    @computed_once
    def of(cls, run: RunFiles) -> _Curves:
        losses = thin(run.step_curve("loss"))
        smooth = replace(losses, value=moving_median(losses.value))
        evaluated = (run.eval_curve(field) for field in ("top1", "loss"))
        top1, val_loss, lr = map(_points, (*evaluated, run.step_curve("lr")))
        return cls(top1, _points(smooth), val_loss, lr)


def _points(curve: Curve) -> list[XY]:
    shown = thin(curve, _MOST_POINTS)
    return list(zip(shown.epoch.tolist(), shown.value.tolist(), strict=True))


def overview(names: Sequence[str], runs: Sequence[LiveRun], left_out: int) -> tuple[str, list[str]]:
    """Title and parts of the page. `left_out` is the number of runs that are not shown."""
    title = plural(len(runs), "run")
    known = {n: run.files for n, run in enumerate(runs) if run.files is not None}
    labels = run_labels(known)
    rows = "".join(
        _row(number, name, run, labels.get(number, ""))
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
    )
    heads = "".join(
        f'<th scope="col"{_TEXT * (n < _TEXT_COLUMNS)}><button type="button">{name}</button></th>'
        for n, name in enumerate(_COLUMNS)
    )
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    cards = "\n".join(
        _card(number, name, run) for number, (name, run) in enumerate(zip(names, runs, strict=True))
    )
    more = f"{plural(left_out, 'more run')} not shown; name the runs to watch" if left_out else ""
    return title, [
        f"<header><p>Paceline watch</p>\n<h1>{markup(title)}</h1></header>",
        f'<p class="note">{markup(more)}</p>' if more else "",
        '<p class="filter"><label>Filter <input type="search" placeholder="name, state, setting…">'
        "</label></p>",
        f'<div class="card overview">{scrolled(table, 1000)}</div>',
        figures(_charts({n: (names[n], files) for n, files in known.items()})),
        f'<section class="runs">{cards}</section>',
    ]


_COLUMNS = (
    "run", "state", "differs in", "step", "top-1 %", "best %", "loss", "images/s", "time",
)  # fmt: skip
_TEXT_COLUMNS, _TEXT = 3, ' class="text"'


def run_labels(runs: dict[int, RunFiles]) -> dict[int, str]:
    """The settings in which the runs differ, as in a comparison, and the seed."""
    settings = {n: settings_of(run, Outcome.of(run)) for n, run in runs.items() if run.config}
    rows: list[dict[str, Any]] = list(settings.values())
    names = naming_settings(rows, differing_settings(rows)) if len(rows) > 1 else []
    seeds = {n: runs[n].config.get("run", {}) for n in settings}
    seeds = {n: run.get("seed") for n, run in seeds.items() if isinstance(run, dict)}
    if len(set(map(str, seeds.values()))) > 1:
        names.append(SEED)
        rows = [{**row, SEED: seeds.get(n)} for n, row in settings.items()]
    short = short_names([*(name for row in rows for name in row), "run.name"])
    return {
        n: " ".join(f"{short[name]}={value_text(row, name)}" for name in names)
        for n, row in zip(settings, rows, strict=True)
    }


def _row(number: int, name: str, run: LiveRun, label: str) -> str:
    colour, dashed = series_look(number)
    link = f'<a href="/run/{number}">{markup(name)}</a>'
    look = f"key-line c{colour}{' dashed' * dashed}"
    cells: list[tuple[str, float | None]]
    if run.files is None:
        state, cells = "unknown", [(UNKNOWN, None)] * (len(_COLUMNS) - _TEXT_COLUMNS)
    else:
        outcome = Outcome.of(run.files)
        state, losses = outcome.state, run.files.steps()["loss"]
        latest = middle(losses[-20:])
        cells = [
            (count(outcome.steps), outcome.steps),
            (format_percent(outcome.top1), outcome.top1),
            (format_percent(outcome.best_top1), outcome.best_top1),
            (loss(latest), latest),
            (rate(outcome.images_per_s), outcome.images_per_s),
            (format_duration(outcome.train_s), outcome.train_s),
        ]
    numbers = "".join(
        f'<td data-value="{"" if value is None else value}">{markup(text.removesuffix(" %"))}</td>'
        for text, value in cells
    )
    return (
        f'<tr data-run="{number}"><td class="text"><span class="{look}"></span>{link}</td>'
        f'<td class="text">{state}</td><td class="text">{markup(label)}</td>{numbers}</tr>'
    )


def _charts(runs: dict[int, tuple[str, RunFiles]]) -> list[Chart]:
    """A line for each run, in the colour of its row."""

    def lines(field: str) -> list[Line]:
        found = []
        for number, (name, files) in runs.items():
            colour, dashed = series_look(number)
            points = getattr(_Curves.of(files), field)
            shown = name if len(runs) <= _MOST_NAMED else ""
            found.append(Line(shown, points, colour, dashed=dashed, run=number))
        return found

    top1, losses, val_losses, rates = map(lines, ("top1", "loss", "val_loss", "lr"))
    last = max((x for line in (*top1, *losses) for x, _ in line.points), default=0.0) or 1.0
    axis: dict[str, Any] = {"x_label": "epoch", "x_range": (0.0, last), "legend": False}
    return [
        Chart("Validation top-1 (%)", lines=top1, show_value=format_percent, **axis),
        Chart("Training loss", lines=losses, log=spans_decades(losses), show_value=loss,
              note="smoothed", **axis),
        Chart("Validation loss", lines=val_losses, log=spans_decades(val_losses), show_value=loss,
              **axis),
        Chart("Learning rate", lines=rates, log=spans_decades([*map(_peak, rates)]), **axis),
    ]  # fmt: skip


def _peak(line: Line) -> Line:
    """Every rate decays; an axis is logarithmic if the highest ones differ by decades."""
    return replace(
        line, points=[max(line.points, key=lambda point: point[1])] if line.points else []
    )


def _card(number: int, name: str, run: LiveRun) -> str:
    link = f'<h2><a href="/run/{number}">{markup(name)}</a></h2>'
    if run.files is None:
        body = f'<p class="note">{markup(run.problem)}</p>'
    else:
        state = Outcome.of(run.files).state
        body = (
            f'<p><span class="state {state}">{state}</span>{markup(verdict(run.files))}</p>'
            f"{efficiency_section(run.files, heading=False)}"
        )
    return f'<article class="card" data-run="{number}">{link}{body}</article>'
