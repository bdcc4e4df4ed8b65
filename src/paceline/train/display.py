"""Displays the progress of training or of preparing data: live on a terminal, else as plain lines."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
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

from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    GenerationEvent,
    LengthEvent,
    NoteEvent,
    Observer,
    StartEvent,
    StepEvent,
    StopEvent,
)
from paceline.core.units import format_duration, format_percent, plural
from paceline.core.untrusted import one_line, printable
from paceline.optim.scaling_report import describe_in_lines

# The displayed rate is the median over this number of steps, so that one slow step does not change it.
_RATE_STEPS = 20
# Fraction of a step's time above which the cause of its input stall is displayed.
_NOTABLE_STALL = 0.05
# Time above which a part of the start-up is displayed.
_NOTABLE_PART_S = 0.05


def create_display(console: Console, log_interval: int) -> Observer:
    """Creates a display for a console.

    Args:
        console: The console. On a terminal, the display is a live progress line.
        log_interval: Number of steps between lines if the console is not a terminal.
    """
    if console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console, log_interval)


class PlainDisplay:
    """Prints a line every `log_interval` steps, and a line for every event that is not a step."""

    def __init__(self, console: Console, log_interval: int) -> None:
        self._console = console
        self._interval = log_interval
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self._total = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, StartEvent | LengthEvent):
            self._total = event.total_steps
        if isinstance(event, StepEvent):
            self._rates.append(event.images_per_s)
            last = event.step == self._total
            if event.skipped or last or event.step % self._interval == 0:
                line = f"step {event.step}/{self._total} {describe_step(event, self._rates)}"
                print_line(self._console, line)
        elif text := describe_event(event):
            print_line(self._console, text)

    def close(self) -> None:
        """Does nothing."""


class LiveDisplay:
    """Updates a progress line at the bottom; all events except steps scroll above this line."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            # A short bar, so that all numbers fit into 80 columns.
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
        if isinstance(event, StartEvent | LengthEvent):
            self._progress.update(self._task, total=event.total_steps, completed=event.step)
        if isinstance(event, StepEvent):
            self._rates.append(event.images_per_s)
            numbers = describe_step(event, self._rates)
            self._progress.update(self._task, completed=event.step, numbers=numbers)
        elif text := describe_event(event):
            self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def describe_event(event: Event) -> str | None:
    """Returns the line to display for an event; None for a step or an event without such a line."""
    match event:
        case StartEvent():
            begin = f"resumed from {event.resumed_from}" if event.resumed_from else "starting"
            lines = [f"{begin} at step {event.step} of {event.total_steps}"]
            for name, value in event.chosen.items():
                if name == "scaling":
                    value = describe_in_lines(value, indent="    ")
                    lines += f"  {name}: {value}".splitlines()
                else:
                    lines.append(f"  {name}: {value}")
            if event.startup_s:
                lines.append(f"  start-up: {_describe_startup(event.startup_s)}")
            return "\n".join(printable(line.replace("\n", " ")) for line in lines)
        case EvalEvent():
            return (
                f"epoch {event.epoch:g}: top-1 {format_percent(event.top1)}, "
                f"top-5 {format_percent(event.top5)}, loss {event.loss:.4f} "
                f"on {event.samples} images ({format_duration(event.eval_s)})"
                f"{event.remark and '; '}{event.remark}"
            )
        case CheckpointEvent():
            return printable(f"saved {event.path}{' (best so far)' if event.best else ''}")
        case LengthEvent():
            steps = f"the run has {event.total_steps} steps in {event.epochs} epochs"
            return f"{steps}, corrected by the measured time"
        case CorruptEvent():
            action = "left out" if event.split == "val" else "replaced by its successor"
            return one_line(f"corrupt, {action}: {event.name} ({event.reason})")
        case GenerationEvent():
            again = ", repeating a step" if event.repeated else ""
            return printable(
                f"{event.cause}: continuing after step {event.step} on {plural(event.ranks, 'rank')}"
                f"{again} ({format_duration(event.recover_s)})"
            )
        case StopEvent() if event.reason != "finished":
            return printable(f"stopped after step {event.step}: {event.reason}")
        case NoteEvent():
            return one_line(event.text)
    return None


def _describe_startup(seconds: Mapping[str, float]) -> str:
    """Returns a text such as `3.2 s until here: imports 2.1, data 0.8, step 0.3`."""
    parts = [f"{part} {took:.1f}" for part, took in seconds.items() if took >= _NOTABLE_PART_S]
    whole = f"{sum(seconds.values()):.1f} s until here"
    return f"{whole}: {', '.join(parts)}" if parts else whole


def describe_step(event: StepEvent, rates: deque[float]) -> str:
    """Returns the line to display for a step, with the median of `rates` (images per second)."""
    stall = ""
    causes = event.input_stall_causes
    if causes and event.input_stall_s > _NOTABLE_STALL * event.step_s:
        stall = f" input: {max(causes, key=lambda cause: causes[cause])}"
    skipped = " SKIPPED (gradient not finite)" if event.skipped else ""
    return (
        f"epoch {event.epoch:.2f} loss {event.loss:.4f} lr {event.lr:.4g} "
        f"{statistics.median(rates):,.0f} images/s{stall}{skipped}"
    )


class ProgressBars:
    """Progress bars on standard error if it is a terminal. `update` adds a bar for each new name."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, done: int, total: int, note: str = "") -> None:
        """Updates the bar `name` to `done` of `total`."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note="")
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._progress.stop()


def print_line(console: Console, text: str) -> None:
    """Prints a text without markup and line breaks, so that paths can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
