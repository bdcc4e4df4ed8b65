"""`RunFiles`: what a run folder holds, read once.

In: a folder with `metrics.jsonl` (rank 0), `metrics.rank1.jsonl` … (the others), `config.toml` and,
once the run has ended, `summary.json`. Out: the records that count, by rank, with the summary and
the configuration. A resumed run does some steps anew: what it did after the step it went back to is
superseded and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
