"""The report of a run: one HTML page, and its figures as rows for the terminal.

An unfinished run has a report of what there is so far.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.core.errors import DataError
from paceline.core.files import whole_file
from paceline.core.units import format_percent
from paceline.report import tables
from paceline.report.bottleneck import ExposedWaits, InputStall, bound_by
from paceline.report.chart import XY, Chart, Line, Marker
from paceline.report.html import (
    card_section,
    definition_list,
    document,
    figures,
    list_section,
    section,
)
from paceline.report.outcome import Outcome, verdict
from paceline.report.quantities import count, date, loss, markup, number, rate, text_of
from paceline.report.run_files import EVENTS_NAME, Point, RunFiles, finite

# More points than this are closer than a pixel in a chart of one column.
MAX_POINTS = 600
# A shorter curve is not smoothed.
_MIN_SMOOTHED = 40
# A loss that spans more than this has a logarithmic axis: else one spike flattens the rest.
_LOG_SPAN = 100.0
_MAX_SKIP_MARKERS = 200


def run_charts(run: RunFiles) -> list[Chart]:
    """The last one, exposed communication, only for runs of several ranks."""
    axis = _XAxis(run)
    losses, speeds = run.points("step", "loss"), run.points("step", "images_per_s")
    loss_lines = [
        *axis.smoothed("training", losses),
        axis.line("validation", run.points("eval", "loss"), 2),
    ]
    charts = [
        axis.chart(
            "Accuracy (%)",
            [
                axis.line("top-1", run.points("eval", "top1"), 1),
                axis.line("top-5", run.points("eval", "top5"), 2),
            ],
            show_value=format_percent,
        ),
        axis.chart(
            "Loss",
            loss_lines,
            log=spans_decades(loss_lines),
            markers=[*axis.resumes(), *axis.skips()],
            show_value=loss,
            note=_smoothing(losses),
        ),
        axis.chart(
            "Learning rate", [axis.line("rate", run.points("step", "lr"), 1)], from_zero=True
        ),
        *_scheduled(run, axis),
        axis.chart(
            "Throughput (images/s)",
            axis.smoothed("images/s", speeds),
            from_zero=True,
            show_value=rate,
            note=_smoothing(speeds),
        ),
    ]
    if ExposedWaits.of(run).exposed_s is not None:
        waits = [p._replace(value=1e3 * p.value) for p in run.points("step", "exposed_comm_s")]
        lines = axis.smoothed("rank 0 waits", waits)
        note = _smoothing(waits)
        charts.append(axis.chart("Exposed communication (ms)", lines, from_zero=True, note=note))
    if noise := run.points("step", "noise_scale"):
        lines = axis.smoothed("noise scale", noise)
        charts.append(
            axis.chart(
                "Gradient noise scale (samples)", lines, log=spans_decades(lines), show_value=count
            )
        )
    return charts


def _scheduled(run: RunFiles, axis: _XAxis) -> list[Chart]:
    """Charts of batch and momentum, where a schedule changes them."""
    found = []
    if batches := run.points("step", "batch_size"):
        line = axis.line("samples a step", batches, 1)
        found.append(axis.chart("Global batch", [line], from_zero=True, show_value=rate))
    if momenta := run.points("step", "momentum"):
        found.append(axis.chart("Momentum", [axis.line("momentum", momenta, 1)]))
    return found


class _XAxis:
    """Epochs, or steps where the run is shorter than an epoch."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        records = [*run.of_kind("step"), *run.of_kind("eval")]
        self._epochs = sorted((r["step"], finite(r, "epoch") or 0.0) for r in records)
        self._last_step = max((step for step, _ in self._epochs), default=0)
        last_epoch = max((epoch for _, epoch in self._epochs), default=0.0)
        self._by_epoch = last_epoch >= 1
        self._label = "epoch" if self._by_epoch else "step"
        self._range: XY = (0.0, (last_epoch if self._by_epoch else float(self._last_step)) or 1.0)

    def line(self, name: str, points: Sequence[Point], colour: int, faint: bool = False) -> Line:
        xy = [(p.epoch if self._by_epoch else p.step, p.value) for p in thin(points)]
        return Line(name, xy, colour, faint)

    def smoothed(self, name: str, points: Sequence[Point]) -> list[Line]:
        """The smoothed curve, with the measured values behind it."""
        if len(points) < _MIN_SMOOTHED:
            return [self.line(name, points, 1)]
        return [
            self.line(name, moving_median(points), 1),
            self.line("single steps", points, 1, faint=True),
        ]

    def chart(
        self,
        title: str,
        lines: Sequence[Line],
        *,
        log: bool = False,
        from_zero: bool = False,
        markers: Sequence[Marker] | None = None,
        show_value: Callable[[float], str] = number,
        note: str = "",
    ) -> Chart:
        shown = self.resumes() if markers is None else markers
        return Chart(
            title, self._label, lines, self._range, log, from_zero, shown, show_value, note
        )

    def resumes(self) -> list[Marker]:
        return [
            Marker(self._x(start["step"]), f"resumed at step {count(start['step'])}")
            for start in self._run.resumes
            if start["step"] <= self._last_step
        ]

    def skips(self) -> list[Marker]:
        skipped = [record for record in self._run.of_kind("step") if record.get("skipped") is True]
        every = max(1, -(-len(skipped) // _MAX_SKIP_MARKERS))
        return [
            Marker(self._x(record["step"]), f"step {count(record['step'])} skipped", "skip")
            for record in skipped[::every]
        ]

    def _x(self, step: int) -> float:
        """A step on the axis; its epoch is that of the last record up to it."""
        if not self._by_epoch:
            return float(step)
        before = bisect_right(self._epochs, (step, math.inf))
        return self._epochs[before - 1][1] if before else 0.0


def spans_decades(lines: Sequence[Line]) -> bool:
    """Whether only a logarithmic axis shows all values."""
    values = [value for line in lines for _, value in line.points]
    return bool(values) and min(values) > 0 and max(values) / min(values) > _LOG_SPAN


def _smoothing(points: Sequence[Point]) -> str:
    if len(points) < _MIN_SMOOTHED:
        return ""
    return f"median of {smoothing_window(len(points))} steps"


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: the first, the last, and between them the median of each group."""
    assert limit >= 3
    if len(points) <= limit:
        return list(points)
    inner, groups = len(points) - 2, limit - 2
    thinned = [points[0]]
    for n in range(groups):
        group = points[1 + n * inner // groups : 1 + (n + 1) * inner // groups]
        middle = group[len(group) // 2]
        thinned.append(middle._replace(value=median(point.value for point in group)))
    return [*thinned, points[-1]]


def smoothing_window(length: int) -> int:
    """An odd number of points, about 4 % of the curve."""
    return max(9, min(501, length // 25)) | 1


def moving_median(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """Each value replaced by the median of those around it: a spike in the loss does not bend the curve.

    At the start the window grows with the curve, which keeps a steep start; at the end it shrinks on one
    side, so that the last value is not a single measurement.
    """
    half = (window or smoothing_window(len(points))) // 2
    ordered: list[float] = []
    smooth = []
    entered = 0
    for i, point in enumerate(points):
        while entered <= min(len(points) - 1, i + min(i, half)):
            insort(ordered, points[entered].value)
            entered += 1
        if i > half:
            del ordered[bisect_left(ordered, points[i - half - 1].value)]
        middle = len(ordered) // 2
        value = ordered[middle]
        if len(ordered) % 2 == 0:
            value = (ordered[middle - 1] + value) / 2
        smooth.append(point._replace(value=value))
    return smooth


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
            section("Staleness", [tables.staleness_table(run)]),
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
