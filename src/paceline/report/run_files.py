"""`RunFiles`: the records, summary and configuration of a run folder.

A run folder holds `metrics.jsonl` (rank 0), `metrics.rank1.jsonl` … (the other ranks; few or none where
ranks are many), `config.toml` and, once the run has ended, `summary.json`. A resumed run repeats some
steps: the records after the step that it returned to are superseded and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.core.errors import DataError
from paceline.core.events import read_events
from paceline.core.untrusted import ParseError, is_finite, parse_json, parse_toml

Record = dict[str, Any]

EVENTS_NAME = "metrics.jsonl"
_RANK_NAME = re.compile(r"metrics\.rank(\d+)\.jsonl")
# A step has at most one record of these kinds; of the others it may have several.
_ONE_PER_STEP = frozenset({"step", "eval", "checkpoint", "ranks"})
_WITH_STEP = _ONE_PER_STEP | {"start", "corrupt", "stop"}
# Larger values measure nothing, and would overflow the arithmetic of an axis.
_MAX_VALUE = 1e100


class Point(NamedTuple):
    """One value of a curve."""

    step: int
    epoch: float
    value: float


@dataclass(frozen=True)
class RunFiles:
    """`ranks` has the records of each rank, in the order in which they were written."""

    path: Path
    ranks: dict[int, tuple[Record, ...]]
    summary: Record | None
    config: Record

    @classmethod
    def read(cls, path: Path, *, first_rank_only: bool = False) -> RunFiles:
        """Raises `DataError` where `path` is no run folder or a file in it is damaged.

        A comparison reads rank 0 alone: runs of many ranks have many records.
        """
        try:
            _check_folder(path)
            files = {0: path / EVENTS_NAME}
            for file in [] if first_rank_only else sorted(path.iterdir()):
                if matched := _RANK_NAME.fullmatch(file.name):
                    files[int(matched[1])] = file
            ranks = {
                rank: tuple(current_records(_checked(file))) for rank, file in sorted(files.items())
            }
            summary = _read_summary(path / "summary.json")
            config = _read_config(path / "config.toml")
        except OSError as error:
            raise DataError(
                f"{error.filename or path} cannot be read: {error.strerror}",
                "check its permissions",
            ) from error
        if _continues(ranks[0]):
            summary = None
        return cls(path, ranks, summary, config)

    @property
    def events(self) -> tuple[Record, ...]:
        """The records of rank 0, which describe the whole run."""
        return self.ranks[0]

    def of_kind(self, kind: str, rank: int = 0) -> list[Record]:
        return [record for record in self.ranks[rank] if record["event"] == kind]

    @property
    def start(self) -> Record:
        """The latest start; empty before the first one."""
        return (self.of_kind("start") or [{}])[-1]

    @property
    def resumes(self) -> list[Record]:
        """All starts but the first, and the first one too where it continued another run."""
        starts = self.of_kind("start")
        return [
            start
            for i, start in enumerate(starts)
            if i > 0 or start.get("resumed_from") is not None
        ]

    def points(self, kind: str, field: str) -> list[Point]:
        """A field of the `step` or `eval` records; those in which it is not finite have no point."""
        return sorted(
            Point(record["step"], finite(record, "epoch") or 0.0, value)
            for record in self.of_kind(kind)
            if (value := finite(record, field)) is not None
        )

    def values(self, kind: str, field: str, rank: int = 0) -> list[float]:
        return finite_values(self.of_kind(kind, rank), field)


def finite(record: Record, name: str) -> float | None:
    """A field as a number; None where it is absent, null (JSON's NaN), huge or of another type."""
    value = record.get(name)
    if not is_finite(value) or abs(value) > _MAX_VALUE:
        return None
    return float(value) if abs(value) > 1 / _MAX_VALUE else 0.0


def finite_values(records: Iterable[Record], name: str) -> list[float]:
    return [value for record in records if (value := finite(record, name)) is not None]


def integer(record: Record, name: str) -> int | None:
    value = finite(record, name)
    return None if value is None else round(value)


def current_records(records: Iterable[Record]) -> list[Record]:
    """Without superseded ones: a start at step s drops the earlier records of steps after s."""
    kept: list[Record] = []
    for record in records:
        if record["event"] == "start":
            # Earlier starts are the history of the run.
            kept = [
                old
                for old in kept
                if old["event"] == "start" or old.get("step", 0) <= record["step"]
            ]
        kept.append(record)
    last = {(record["event"], record.get("step")): i for i, record in enumerate(kept)}
    return [
        record
        for i, record in enumerate(kept)
        if record["event"] not in _ONE_PER_STEP or last[record["event"], record["step"]] == i
    ]


def _checked(file: Path) -> Iterable[Record]:
    for line, record in enumerate(read_events(file), start=1):
        if type(record.get("step", None if record["event"] in _WITH_STEP else 0)) is not int:
            raise DataError(
                f"{file}: line {line} has no whole number as its step",
                "restore the file, or delete that line",
            )
        yield record


def _continues(events: tuple[Record, ...]) -> bool:
    """Whether the run was resumed after its end: its summary is then out of date."""
    kinds = [record["event"] for record in events if record["event"] in ("start", "stop")]
    return "stop" in kinds and kinds[-1] == "start"


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
