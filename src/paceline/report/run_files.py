"""`RunFiles`: what a run folder holds, read once.

In: a folder with `metrics.jsonl` (rank 0), `metrics.rank1.jsonl` … (the others), `config.toml` and,
once the run has ended, `summary.json`. Out: the records that count, by rank, with the summary and
the configuration. A resumed run does some steps anew: what it did after the step it went back to is
superseded and left out.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import DataError
from paceline.core.events import read_events
from paceline.core.untrusted import ParseError, is_finite, parse_json, parse_toml

Record = dict[str, Any]

EVENTS_NAME = "metrics.jsonl"
_RANK_NAME = re.compile(r"metrics\.rank(\d+)\.jsonl")
# One of each is in force for a step; of the others, a step may have several.
_ONE_A_STEP = frozenset({"step", "eval", "checkpoint"})
# What is larger is no measure of anything, and would overflow the arithmetic of an axis.
_RUNAWAY = 1e100
_WITH_A_STEP = _ONE_A_STEP | {"start", "corrupt", "stop"}


@dataclass(frozen=True)
class RunFiles:
    """A run as its files tell it."""

    path: Path
    ranks: dict[int, tuple[Record, ...]]
    summary: Record | None
    config: Record

    @classmethod
    def read(cls, path: Path, *, first_rank_only: bool = False) -> RunFiles:
        """Reads the run folder `path`; `DataError` where it is none, or where a file is broken.

        `first_rank_only` leaves out the records of the other ranks, which many runs have many of.
        """
        try:
            _check_folder(path)
            files = {0: path / EVENTS_NAME}
            for file in [] if first_rank_only else sorted(path.iterdir()):
                if matched := _RANK_NAME.fullmatch(file.name):
                    files[int(matched[1])] = file
            ranks = {rank: tuple(live(_checked(file))) for rank, file in sorted(files.items())}
            summary = _read_summary(path / "summary.json")
            config = _read_config(path / "config.toml")
        except OSError as error:
            raise DataError(
                f"{error.filename or path} cannot be read: {error.strerror}",
                "check its permissions",
            ) from error
        if summary is not None and _goes_on(ranks[0]):
            summary = None
        return cls(path, ranks, summary, config)

    @property
    def events(self) -> tuple[Record, ...]:
        """Rank 0's records, which speak for the whole run."""
        return self.ranks[0]

    def of_kind(self, kind: str, rank: int = 0) -> list[Record]:
        """The records of one kind, in the order in which they were written."""
        return [record for record in self.ranks[rank] if record["event"] == kind]

    @property
    def resumes(self) -> list[Record]:
        """Starts after the first, and a first one that went on from another run."""
        starts = self.of_kind("start")
        return [
            start
            for i, start in enumerate(starts)
            if i > 0 or start.get("resumed_from") is not None
        ]


def finite(record: Record, name: str) -> float | None:
    """A field as a number; None where it is absent, null (JSON's NaN), huge or anything else."""
    value = record.get(name)
    if not is_finite(value) or abs(value) > _RUNAWAY:
        return None
    return float(value) if abs(value) > 1 / _RUNAWAY else 0.0


def whole(record: Record, name: str) -> int | None:
    """A field as a whole number; None where it is not one."""
    value = finite(record, name)
    return None if value is None else round(value)


def live(records: Iterable[Record]) -> list[Record]:
    """The records that count: a start at step s drops what came before it with a step beyond s."""
    kept: list[Record] = []
    for record in records:
        if record["event"] == "start":
            resumed_at = record["step"]
            # Starts tell the run's history: they stay.
            kept = [
                old for old in kept if old["event"] == "start" or old.get("step", 0) <= resumed_at
            ]
        kept.append(record)
    last = {
        (record["event"], record["step"]): place
        for place, record in enumerate(kept)
        if record["event"] in _ONE_A_STEP
    }
    return [
        record
        for place, record in enumerate(kept)
        if record["event"] not in _ONE_A_STEP or last[record["event"], record["step"]] == place
    ]


def _checked(file: Path) -> Iterable[Record]:
    for line, record in enumerate(read_events(file), start=1):
        step = record.get("step", 0)
        missing = record["event"] in _WITH_A_STEP and "step" not in record
        if missing or isinstance(step, bool) or not isinstance(step, int):
            raise DataError(
                f"{file}: line {line} has no whole number as its step",
                "restore the file, or delete that line",
            )
        yield record


def _goes_on(events: tuple[Record, ...]) -> bool:
    """Whether the run was taken up again after its end: its summary then tells of the past."""
    ends = [place for place, record in enumerate(events) if record["event"] == "stop"]
    starts = [place for place, record in enumerate(events) if record["event"] == "start"]
    return bool(ends and starts and starts[-1] > ends[-1])


def _check_folder(path: Path) -> None:
    remedy = "give the folder that `paceline train --output` wrote"
    if not path.exists():
        raise DataError(f"run folder {path} does not exist", remedy)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder", remedy)
    if (path / EVENTS_NAME).is_file():
        return
    inside = [file.parent for file in path.glob(f"*/{EVENTS_NAME}")]
    if inside:
        newest = max(inside, key=lambda folder: (folder / EVENTS_NAME).stat().st_mtime)
        remedy = f"did you mean {newest}?"
    raise DataError(f"{path} is not a run folder: it has no {EVENTS_NAME}", remedy)


def _read_summary(file: Path) -> Record | None:
    if not file.exists():
        return None
    try:
        summary = parse_json(file.read_bytes())
    except ParseError as error:
        raise DataError(f"{file} is not JSON: {error}", "restore it, or delete it") from error
    if not isinstance(summary, dict):
        raise DataError(f"{file} holds no table", "restore it, or delete it")
    return summary


def _read_config(file: Path) -> Record:
    if not file.exists():
        return {}
    try:
        return parse_toml(file.read_bytes())
    except ParseError as error:
        raise DataError(f"{file} is not TOML: {error}", "restore it, or delete it") from error


# Curves of a run, thinned to what a chart can show.
#
# In: a `RunFiles`. Out: points (step, epoch, value) of one quantity, few enough to draw. Steps
# whose value is not a number (a loss that overflowed) have no point.


# More points than this lie closer than a pixel in a chart of one column.
MAX_POINTS = 600


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    epoch: float
    value: float


def step_points(run: RunFiles, field: str) -> list[Point]:
    """A quantity of the training steps: `loss`, `lr`, `images_per_s`."""
    return _points(run, "step", field)


def eval_points(run: RunFiles, field: str) -> list[Point]:
    """A quantity of the evaluations: `top1`, `top5`, `loss`."""
    return _points(run, "eval", field)


def _points(run: RunFiles, kind: str, field: str) -> list[Point]:
    points = [
        Point(record["step"], finite(record, "epoch") or 0.0, value)
        for record in run.of_kind(kind)
        if (value := finite(record, field)) is not None
    ]
    return sorted(points)


def median(values: Sequence[float]) -> float:
    """The middle value; of an even number, the mean of the two in the middle."""
    assert values
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: both ends as they are, between them the median of each bucket."""
    assert limit >= 3
    if len(points) <= limit:
        return list(points)
    inner, buckets = len(points) - 2, limit - 2
    thinned = [points[0]]
    for bucket in range(buckets):
        group = points[1 + bucket * inner // buckets : 1 + (bucket + 1) * inner // buckets]
        middle = group[len(group) // 2]
        thinned.append(middle._replace(value=median([point.value for point in group])))
    return [*thinned, points[-1]]


def smoothing_window(length: int) -> int:
    """An odd number of points, some 4 % of the curve: steady, yet it follows a change of rate."""
    return max(9, min(501, length // 25)) | 1


def moving_median(points: Sequence[Point], window: int | None = None) -> list[Point]:
    """Each value replaced by the median of those around it.

    A median, not a mean: one spike in the loss must not bend the curve for a whole window. The
    window opens with the curve, so that a steep start stays; at the end it takes what there is, so
    that the last value is no single one.
    """
    half = (window or smoothing_window(len(points))) // 2
    ordered: list[float] = []
    smooth = []
    entered = 0
    for place, point in enumerate(points):
        while entered <= min(len(points) - 1, place + min(place, half)):
            insort(ordered, points[entered].value)
            entered += 1
        if place > half:
            del ordered[bisect_left(ordered, points[place - half - 1].value)]
        middle = len(ordered) // 2
        value = ordered[middle]
        if len(ordered) % 2 == 0:
            value = (ordered[middle - 1] + value) / 2
        smooth.append(point._replace(value=value))
    return smooth
