"""What a person sees during a run: a live line on a terminal, plain lines elsewhere.

In: the run's events, on rank 0. Out: text on standard output. Both displays say the same.
"""

from __future__ import annotations

import statistics
from collections import deque
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    NoteEvent,
    Observer,
    StartEvent,
    StepEvent,
    StopEvent,
)
from paceline.core.untrusted import one_line, printable
from paceline.report.run_files import RunFiles
from paceline.report.run_page import summary_rows, verdict

# The rate shown is the median of this many steps: one slow step does not make it jump.
_RATE_STEPS = 20
# A step that stands still for its input longer than this share of its time says why.
_NOTABLE_STALL = 0.05


def create_display(console: Console, log_interval: int) -> Observer:
    """Live where there is a terminal."""
    if console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console, log_interval)


def notable(event: Event) -> str | None:
    """The text for an event that is not a step; names in it come from outside."""
    text = _text_of(event)
    return None if text is None else "\n".join(map(printable, text.split("\n")))


def _text_of(event: Event) -> str | None:
    match event:
        case StartEvent():
            begin = f"resumed from {event.resumed_from}" if event.resumed_from else "starting"
            lines = [f"{begin} at step {event.step} of {event.total_steps}"]
            lines += [f"  {name}: {value}" for name, value in event.chosen.items()]
            return "\n".join(line.replace("\n", " ") for line in lines)
        case EvalEvent():
            return (
                f"epoch {event.epoch:g}: top-1 {event.top1:.2f} %, top-5 {event.top5:.2f} %, "
                f"loss {event.loss:.4f} on {event.samples} images ({event.eval_s:.1f} s)"
            )
        case CheckpointEvent():
            return f"saved {event.path}{' (best so far)' if event.best else ''}"
        case CorruptEvent():
            fate = "left out" if event.split == "val" else "replaced by its successor"
            return one_line(f"corrupt, {fate}: {event.name} ({event.reason})")
        case StopEvent() if event.reason != "finished":
            return f"stopped after step {event.step}: {event.reason}"
        case NoteEvent():
            return one_line(event.text)
    return None


class PlainDisplay:
    """A line every `log_interval` steps, and one for everything notable."""

    def __init__(self, console: Console, log_interval: int) -> None:
        self._console = console
        self._interval = log_interval
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self._total = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self._total = event.total_steps
        if isinstance(event, StepEvent):
            self._rates.append(event.images_per_s)
            last = event.step == self._total
            if event.skipped or last or event.step % self._interval == 0:
                self._say(f"step {event.step}/{self._total} {describe(event, self._rates)}")
            return
        text = notable(event)
        if text:
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Plain lines leave nothing behind."""


class LiveDisplay:
    """One progress line at the bottom; notable events scroll by above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            # The numbers matter more than a long bar: all of it fits into 80 columns.
            BarColumn(bar_width=6),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task("training", total=None, numbers="")
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self._progress.start()

    def on_event(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self._progress.update(self._task, total=event.total_steps, completed=event.step)
        if isinstance(event, StepEvent):
            self._rates.append(event.images_per_s)
            self._progress.update(
                self._task, completed=event.step, numbers=describe(event, self._rates)
            )
            return
        text = notable(event)
        if text:
            self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def describe(event: StepEvent, rates: deque[float]) -> str:
    """The numbers of a step, the same on both displays."""
    skipped = " SKIPPED (gradient not finite)" if event.skipped else ""
    return (
        f"epoch {event.epoch:.2f} loss {event.loss:.4f} lr {event.lr:.4g} "
        f"{statistics.median(rates):,.0f} images/s{_stall(event)}{skipped}"
    )


def _stall(event: StepEvent) -> str:
    """` input: decode` where the step stood still for its batch, and what making that took longest."""
    causes = event.input_stall_causes
    if not causes or event.input_stall_s <= _NOTABLE_STALL * event.step_s:
        return ""
    return f" input: {max(causes, key=lambda cause: causes[cause])}"


# Progress bars for work on data: one for each thing that is being done.
#
# In: how much of what is done. Out: live bars on a terminal's standard error, nothing elsewhere.


class ProgressBars:
    """A bar appears when it is first told of."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[remark]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, what: str, done: int, total: int, remark: str = "") -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total, remark="")
        self._progress.update(self._tasks[what], completed=done, total=total, remark=remark)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()


# The table at the end of a run, and of `paceline report`.


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
