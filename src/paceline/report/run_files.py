"""`RunFiles`: the records, summary and configuration of a run folder.

A run folder holds `metrics.jsonl` (rank 0), `metrics.rank1.jsonl` … (the other ranks; few or none where
ranks are many), `config.toml` and, once the run has ended, `summary.json`. A resumed run repeats some
steps: the records after the step that it returned to are superseded and left out (`records`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from paceline.core.errors import DataError
from paceline.core.events import parse_event, read_events
from paceline.core.files import read_regular
from paceline.core.units import text_of
from paceline.core.untrusted import ParseError, is_count, parse_json, parse_toml
from paceline.report.records import Floats, Ints, Record, Records, Steps, finite

P = ParamSpec("P")
Derived = TypeVar("Derived")

EVENTS_NAME = "metrics.jsonl"
_RANK_NAME = re.compile(r"metrics\.rank(\d+)\.jsonl")
_CHECKPOINT_NAME = re.compile(r"(best|step-\d{1,12})(\.salvaged)?\.pt(\.[a-z]+(-\d+)?)?")
_STEP_NAME = re.compile(r"step-(\d{1,12})\.")
# How a run describes its data ends with this.
_CLASSES = re.compile(r"(\d{1,9}) classes$")
_WITH_STEP = frozenset(
    {"step", "eval", "checkpoint", "ranks", "start", "corrupt", "stop", "metric"}
)


@dataclass(frozen=True)
class Curve:
    """Values by step, all of them finite."""

    step: Ints
    epoch: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RunFiles:
    """`ranks` has the records of each rank."""

    path: Path
    ranks: dict[int, Records]
    summary: Record | None
    config: Record
    # What has been derived from the records, which do not change.
    _derived: dict[tuple[Any, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def read(cls, path: Path, *, first_rank_only: bool = False) -> RunFiles:
        """Raises `DataError` where `path` is no run folder or a file in it is damaged.

        A comparison reads rank 0 alone: runs of many ranks have many records.
        """
        try:
            _check_folder(path)
            files = {0: path / EVENTS_NAME} if first_rank_only else rank_files(path)
            ranks = {rank: Records.of(_checked(file)) for rank, file in files.items()}
            return assemble(path, ranks)
        except OSError as error:
            raise DataError(
                f"{error.filename or path} cannot be read: {error.strerror}",
                "check its permissions",
            ) from error

    @property
    def events(self) -> tuple[Record, ...]:
        """The records of rank 0, which describe the whole run, without those of steps."""
        return self.ranks[0].others

    def steps(self, rank: int = 0) -> Steps:
        return self.ranks[rank].steps

    def of_kind(self, kind: str, rank: int = 0) -> list[Record]:
        """Records of another kind than steps. Not to be changed by the caller."""
        assert kind != "step"
        return self.ranks[rank].by_kind.get(kind, [])

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

    def chosen(self, name: str) -> str:
        """How the run describes a choice; empty if it does not."""
        chosen = self.start.get("chosen")
        found = chosen.get(name) if isinstance(chosen, dict) else None
        return found if isinstance(found, str) else ""

    @property
    def classes(self) -> int:
        """The number of classes; 0 if unknown."""
        described = _CLASSES.search(self.chosen("data"))
        return int(described[1]) if described else 0

    @property
    def shows_top5(self) -> bool:
        """With few classes top-5 says nothing."""
        return not 0 < self.classes < 10

    def step_curve(self, field: str) -> Curve:
        """A field of the steps of rank 0; those in which it is not finite have no point."""
        steps = self.steps()
        found = ~np.isnan(steps[field])
        return Curve(steps.number[found], steps.or_zero("epoch")[found], steps[field][found])

    def eval_curve(self, field: str) -> Curve:
        """Likewise of the evaluations."""
        points = sorted(
            (record["step"], finite(record, "epoch") or 0.0, value)
            for record in self.of_kind("eval")
            if (value := finite(record, field)) is not None
        )
        steps, epochs, values = zip(*points, strict=True) if points else ((), (), ())
        return Curve(np.array(steps, np.int64), np.array(epochs, float), np.array(values, float))

    def logged(self) -> dict[str, dict[int, list[tuple[int, float]]]]:
        """Metrics of the user's callbacks by name and rank: step and value of each entry."""
        found: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for rank in self.ranks:
            for record in self.of_kind("metric", rank):
                values = record.get("values")
                if not isinstance(values, dict):
                    continue
                for name in values:
                    if (value := finite(values, name)) is not None:
                        of_name = found.setdefault(text_of(name), {})
                        of_name.setdefault(rank, []).append((record["step"], value))
        return found


def computed_once(
    derive: Callable[Concatenate[Any, RunFiles, P], Derived],
) -> Callable[Concatenate[Any, RunFiles, P], Derived]:
    """For class methods that derive something from a run: many parts of a page need the same figures."""

    @wraps(derive)
    def known(cls: Any, run: RunFiles, /, *args: P.args, **named: P.kwargs) -> Derived:
        key = (derive, args, *named.values())
        if key not in run._derived:
            run._derived[key] = derive(cls, run, *args, **named)
        found: Derived = run._derived[key]
        return found

    return known


def finite_values(records: Iterable[Record], name: str) -> list[float]:
    return [value for record in records if (value := finite(record, name)) is not None]


@dataclass(frozen=True)
class CheckpointFile:
    """A file in `RUN/checkpoints`; `step` is None where neither its name nor another name of the same
    file has one."""

    name: str
    step: int | None
    bytes: int
    note: str


def checkpoint_files(path: Path) -> list[CheckpointFile]:
    """What exists now, by step, the latest first, `best.pt` before the others. Files may vanish while
    this looks."""
    found: dict[str, os.stat_result] = {}
    with suppress(OSError):
        for entry in os.scandir(path / "checkpoints"):
            with suppress(OSError):
                if _CHECKPOINT_NAME.fullmatch(entry.name) and entry.is_file():
                    found[entry.name] = entry.stat()
    steps = {name: int(match[1]) for name in found if (match := _STEP_NAME.match(name))}
    best = found.get("best.pt")
    files = []
    for name, status in found.items():
        # `best.pt` is a second name of the file of its step, as long as that one is kept.
        same = best is not None and os.path.samestat(status, best)
        step, note = steps.get(name), "best" if same else ""
        if name == "best.pt":
            others = [n for n in steps if os.path.samestat(found[n], status)]
            step, note = (steps[others[0]] if others else None), "best"
        elif ".salvaged." in name:
            note = "saved by one rank after another was lost"
        elif not name.endswith(".pt"):
            note = "set aside"
        files.append(CheckpointFile(text_of(name), step, status.st_size, note))
    return sorted(files, key=lambda f: (f.name != "best.pt", -(f.step or 0), f.name))


def rank_files(path: Path) -> dict[int, Path]:
    """The files of events of a run folder, by rank."""
    files = {0: path / EVENTS_NAME}
    for file in path.iterdir():
        if matched := _RANK_NAME.fullmatch(file.name):
            files[int(matched[1])] = file
    return dict(sorted(files.items()))


def assemble(path: Path, ranks: Mapping[int, Records]) -> RunFiles:
    """The records of each rank, with the other files of the folder. Raises `DataError` and `OSError`."""
    summary = _read(path / "summary.json", "JSON", parse_json)
    config = _read(path / "config.toml", "TOML", parse_toml) or {}
    if _continues(ranks[0].others):
        summary = None
    return RunFiles(path, dict(ranks), summary, config)


def parse_line(line: bytes, file: Path, number: int) -> Record:
    """The record of one line of a file of events, checked."""
    return _with_step(parse_event(line, file, number), file, number)


def _checked(file: Path) -> Iterable[Record]:
    for number, record in enumerate(read_events(file), start=1):
        yield _with_step(record, file, number)


def _with_step(record: Record, file: Path, number: int) -> Record:
    if not is_count(record.get("step", None if record["event"] in _WITH_STEP else 0)):
        raise DataError(
            f"{file}: line {number} has no whole number as its step",
            "restore the file, or delete that line",
        )
    return record


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


def _read(file: Path, form: str, parse: Callable[[bytes], Any]) -> Record | None:
    """The table of a file; None if there is no such file."""
    if not file.exists():
        return None
    try:
        table = parse(read_regular(file))
    except ParseError as error:
        raise DataError(f"{file} is not {form}: {error}", "restore it, or delete it") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} holds no table", "restore it, or delete it")
    return table
