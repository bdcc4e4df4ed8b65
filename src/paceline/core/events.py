"""The events of a run as dataclasses, and the lines of `metrics.jsonl` that record them.

Every line is a JSON object with `event` and `time` (seconds since 1970). A resumed run appends lines;
readers use the last record of a step.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from paceline.core.errors import DataError
from paceline.core.files import open_regular
from paceline.core.untrusted import ParseError, parse_json


@dataclass(frozen=True)
class Event:
    """Base class of all events of a run; `kind` becomes the entry `event` of the record."""

    kind: ClassVar[str] = "event"

    @classmethod
    def names(cls) -> frozenset[str]:
        """Returns the names of the entries of a record, except those that a training strategy adds."""
        return frozenset({"event", "time", *cls.__dataclass_fields__} - {"fields"})

    def to_dict(self) -> dict[str, Any]:
        """Returns the record of the event: all fields, and the entries that a training strategy adds."""
        entries = dict(vars(self))
        fields = entries.pop("fields", {})
        return {"event": self.kind, **entries, **fields}


@dataclass(frozen=True)
class ShownField:
    """A value that a training strategy (`run.strategy`) reports, and how reports display it.

    Attributes:
        name: Name of the field in the strategy's part of the summary and in evaluation records.
        label: The name of the value in tables.
        unit: `duration` (seconds), `rate` or `number`.
        column: The title of the column in comparisons; empty for no column.
        axis: Axis label for a chart of accuracy over this value, a time in minutes; empty for no
            chart.
    """

    name: str
    label: str
    unit: str = "number"
    column: str = ""
    axis: str = ""


@dataclass(frozen=True)
class StartEvent(Event):
    """Training starts or resumes in this process, at `step`."""

    kind: ClassVar[str] = "start"
    step: int
    total_steps: int
    steps_per_epoch: float
    world_size: int
    global_batch_size: int
    resumed_from: str | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hardware: dict[str, str] = field(default_factory=dict)
    # The command line of the whole run, and the settings that differ from their defaults.
    command: str = ""
    changed: list[str] = field(default_factory=list)
    # Seconds of this rank from the start of the command, or of `Trainer.fit`, to this record, by part.
    startup_s: dict[str, float] = field(default_factory=dict)
    # By step field that maps numbers to counts: title of the table, label of numbers, label of counts.
    counts: dict[str, list[str]] = field(default_factory=dict)
    # Figures of the strategy, as `ShownField`s with the name of its `part` of the summary.
    shown: list[dict[str, str]] = field(default_factory=list)
    # Number of processes, if a process computes several ranks; 0: one per rank.
    processes: int = 0


@dataclass(frozen=True)
class LengthEvent(Event):
    """The length of the run changes after `step`, to keep to a time budget."""

    kind: ClassVar[str] = "length"
    step: int
    total_steps: int
    epochs: int


@dataclass(frozen=True)
class StepEvent(Event):
    """One optimizer step is complete. `step` counts from 1, and `loss` is the mean over all ranks."""

    kind: ClassVar[str] = "step"
    step: int
    epoch: float
    loss: float
    lr: float
    images_per_s: float
    step_s: float
    data_s: float
    skipped: bool = False
    loss_scale: float = 1.0
    # Wait of this rank for the exchange after its backward pass.
    exposed_comm_s: float = 0.0
    # Time for which the device of this rank, or on a CPU the step, waited for a batch, and its parts by
    # cause (read, decode, augment, copy).
    input_stall_s: float = 0.0
    input_stall_causes: dict[str, float] = field(default_factory=dict)
    # Share of the time in which threads of this rank could run but had no core, over the last seconds
    # (`HostLoad`); None before the first reading, and if the system has no account of it.
    core_wait_share: float | None = None
    # The norm of all gradients before clipping; None without `optim.clip_norm`.
    grad_norm: float | None = None
    # With `run.noise_scale`: the estimates of the squared gradient and of the variance of the gradient of
    # one sample in this step, and the noise scale from their running averages, in samples.
    grad_signal: float | None = None
    grad_variance: float | None = None
    noise_scale: float | None = None
    # Samples of this step over all ranks; None if `optim.batch_schedule` is empty.
    batch_size: int | None = None
    # None if the schedule does not change `optim.momentum`.
    momentum: float | None = None
    # Entries of the strategy.
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RanksEvent(Event):
    """How the times of one step differ among ranks: `min`, `median`, `max` and the slowest `rank`.

    For `exposed_comm_s`, `rank` is the rank that waited least, because it arrived last, and `others` is
    the median of the other ranks.
    """

    kind: ClassVar[str] = "ranks"
    step: int
    ranks: int
    step_s: dict[str, float]
    exposed_comm_s: dict[str, float]
    input_stall_s: dict[str, float]
    core_wait_share: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalEvent(Event):
    """An evaluation is complete. Counts are exact over all validation images of all ranks."""

    kind: ClassVar[str] = "eval"
    step: int
    epoch: float
    top1: float
    top5: float
    loss: float
    samples: int
    eval_s: float
    # Text that the strategy adds to the line of the evaluation.
    remark: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint is complete, `save_s` seconds after the save began.

    Training was blocked for `stall_s` of these seconds. Without background writing, `stall_s` equals
    `save_s`.
    """

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    save_s: float
    best: bool = False
    stall_s: float | None = None


@dataclass(frozen=True)
class CorruptEvent(Event):
    """A sample could not be decoded. Training uses the next sample instead; validation leaves it out."""

    kind: ClassVar[str] = "corrupt"
    step: int
    name: str
    reason: str
    split: str = "train"


@dataclass(frozen=True)
class StopEvent(Event):
    """Training ended in this process. The reason is `finished`, `target`, a signal or an error."""

    kind: ClassVar[str] = "stop"
    step: int
    reason: str


@dataclass(frozen=True)
class GenerationEvent(Event):
    """Ranks were lost, and the others continue as the next generation of the job.

    `lost` has the numbers that the lost ranks had at the start. `repeated` is True if a step under way is
    repeated. `recover_s` is the time from noticing the loss until the next step could begin.
    """

    kind: ClassVar[str] = "generation"
    step: int
    generation: int
    ranks: int
    lost: list[int]
    cause: str
    repeated: bool
    recover_s: float


@dataclass(frozen=True)
class NoteEvent(Event):
    """A text for the user to read once, such as a warning or an automatic choice."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class MetricEvent(Event):
    """Numbers that a user's callback has logged on this rank."""

    kind: ClassVar[str] = "metric"
    step: int
    values: dict[str, float]


class Observer(Protocol):
    """A receiver of the events of a run, such as a file, a display or TensorBoard."""

    def on_event(self, event: Event) -> None: ...

    def close(self) -> None: ...


# Longer lines are damaged: all events are far shorter.
_LONGEST_LINE = 64 << 20


class JsonlWriter:
    """Appends each event to a file as one write of a whole line, so that a kill loses no earlier event.

    If the file is truncated, replaced or deleted between two events, the writer opens it again and begins
    an empty file with the latest `StartEvent`. It drops events that could not be written.

    Args:
        path: The file. Its folder is created with the first event.
        only: Kinds of events to write; any other event is ignored. The default is all events.
    """

    def __init__(self, path: Path, only: tuple[type[Event], ...] = (Event,)) -> None:
        self._path, self._only = path, only
        self._folder_exists = False
        self._file: io.FileIO | None = None
        # Device, inode and size after the last write.
        self._left: tuple[int, int, int] | None = None
        self._started: tuple[Event, float] | None = None

    def on_event(self, event: Event) -> None:
        """Writes an event with the current time. After an `OSError`, the next call tries again."""
        moment = time.time()
        if not isinstance(event, self._only):
            if isinstance(event, StartEvent):
                self._started = event, moment
            return
        data = _line(event, moment)
        if self._file is None or self._left != _identity_and_size(self._path):
            self._file = self._reopen()
            if self._started is not None and not self._path.stat().st_size:
                data = _line(*self._started) + data
        if isinstance(event, StartEvent):
            self._started = event, moment
        self._left = None
        if self._file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left = _identity_and_size(self._path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _reopen(self) -> io.FileIO:
        self.close()
        self._file = None
        if not self._folder_exists:  # a folder that was deleted later must stay deleted
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._folder_exists = True
        _drop_cut_line(self._path)
        # With O_NONBLOCK, a pipe without a reader is an error instead of a wait.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        return io.FileIO(os.open(self._path, flags, 0o666), "a")


def _identity_and_size(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size


def _line(event: Event, moment: float) -> bytes:
    record = {**event.to_dict(), "time": round(moment, 6)}
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(record), allow_nan=False)
    return text.encode() + b"\n"


def _drop_cut_line(path: Path) -> None:
    """Removes an incomplete last line, which a killed process has left, from a file to append to."""
    if path.is_file():
        with path.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities by None, because JSON does not support them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a metrics file; ignores an incomplete last line of a killed process.

    Raises:
        DataError: If any other line is not a JSON object with an `event`.
    """
    # Reads bytes, because only "\n" ends a line here, and a cut line may end inside a character.
    with open_regular(path) as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE), b""), start=1):
            if not line.endswith(b"\n"):
                return
            yield parse_event(line, path, number)


def parse_event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """Parses line `number` of a metrics file; raises DataError if the line is not an event."""
    try:
        record = parse_json(line)
    except ParseError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise DataError(
            f"{path}: line {number} is not an event record",
            "restore the file, or delete that line",
        )
    return record
