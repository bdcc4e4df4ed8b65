"""`RunFiles`: the records, summary and configuration of a run folder.

A run folder contains `metrics.jsonl` (rank 0), `metrics.rank1.jsonl` … (other ranks; few or none if there
are many ranks), `config.toml` and, after the end of the run, `summary.json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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
# The description of a run's data ends like this.
_CLASSES = re.compile(r"(\d{1,9}) classes$")
_WITH_STEP = frozenset(
    {"step", "eval", "length", "checkpoint", "ranks", "start", "corrupt", "stop", "metric"}
)


@dataclass(frozen=True)
class Curve:
    """The finite values of a metric, with the step and the epoch of each value."""

    step: Ints
    epoch: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run folder.

    Attributes:
        path: The folder.
        ranks: The records of each rank.
        summary: The contents of `summary.json`, or None if the run has not ended.
        config: The contents of `config.toml`; empty if the file does not exist.
    """

    path: Path
    ranks: dict[int, Records]
    summary: Record | None
    config: Record
    # Results of methods decorated with `computed_once`.
    _derived: dict[tuple[Any, ...], Any] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def read(cls, path: Path, *, first_rank_only: bool = False) -> RunFiles:
        """Reads a run folder.

        Args:
            path: The run folder.
            first_rank_only: Reads the records of rank 0 only, as comparisons do to save time.

        Raises:
            DataError: If `path` is not a run folder, or a file in it is damaged or unreadable.
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
        """All records of rank 0 except step records. They describe the whole run."""
        return self.ranks[0].events

    def steps(self, rank: int = 0) -> Steps:
        """Returns the step records of a rank."""
        return self.ranks[rank].steps

    def of_kind(self, kind: str, rank: int = 0) -> list[Record]:
        """Returns the records of a kind other than "step". Callers must not change the list."""
        assert kind != "step"
        return self.ranks[rank].by_kind.get(kind, [])

    @property
    def start(self) -> Record:
        """The latest start record, with the corrected length; empty before the first one."""
        start = (self.of_kind("start") or [{}])[-1]
        for length in self.of_kind("length"):
            if start and (length.get("time") or 0) >= (start.get("time") or 0):
                start = {**start, "total_steps": length.get("total_steps")}
        return start

    @property
    def resumes(self) -> list[Record]:
        """All start records that continue a run."""
        starts = self.of_kind("start")
        return [
            start
            for i, start in enumerate(starts)
            if i > 0 or start.get("resumed_from") is not None
        ]

    def chosen(self, name: str) -> str:
        """Returns what was chosen automatically for `name`, such as `threads`; empty if unknown."""
        choices = self.start.get("chosen")
        description = choices.get(name) if isinstance(choices, dict) else None
        return description if isinstance(description, str) else ""

    @property
    def classes(self) -> int:
        """The number of classes; 0 if unknown."""
        described = _CLASSES.search(self.chosen("data"))
        return int(described[1]) if described else 0

    @property
    def shows_top5(self) -> bool:
        """True unless there are so few classes that top-5 accuracy is meaningless."""
        return not 0 < self.classes < 10

    def step_curve(self, name: str) -> Curve:
        """Returns a field of rank 0's step records as a curve; leaves out values that are not finite."""
        steps = self.steps()
        values = steps[name]
        valid = ~np.isnan(values)
        return Curve(steps.number[valid], steps.or_zero("epoch")[valid], values[valid])

    def eval_curve(self, name: str) -> Curve:
        """Returns a field of rank 0's evaluation records as a curve.

        Leaves out values that are not finite.
        """
        points = sorted(
            (record["step"], finite(record, "epoch") or 0.0, value)
            for record in self.of_kind("eval")
            if (value := finite(record, name)) is not None
        )
        steps, epochs, values = zip(*points, strict=True) if points else ((), (), ())
        return Curve(np.array(steps, np.int64), np.array(epochs, float), np.array(values, float))

    def logged(self) -> dict[str, dict[int, list[tuple[int, float]]]]:
        """Returns the metrics that callbacks logged, as (step, value) pairs by name and rank."""
        metrics: dict[str, dict[int, list[tuple[int, float]]]] = {}
        for rank in self.ranks:
            for record in self.of_kind("metric", rank):
                values = record.get("values")
                if not isinstance(values, dict):
                    continue
                for name in values:
                    if (value := finite(values, name)) is not None:
                        by_rank = metrics.setdefault(text_of(name), {})
                        by_rank.setdefault(rank, []).append((record["step"], value))
        return metrics


def computed_once(
    derive: Callable[Concatenate[Any, RunFiles, P], Derived],
) -> Callable[Concatenate[Any, RunFiles, P], Derived]:
    """Decorates a class method that takes a `RunFiles`, so that its result is computed only once."""

    @wraps(derive)
    def cached(cls: Any, run: RunFiles, /, *args: P.args, **named: P.kwargs) -> Derived:
        key = (derive, args, *named.values())
        if key not in run._derived:
            run._derived[key] = derive(cls, run, *args, **named)
        result: Derived = run._derived[key]
        return result

    return cached


def finite_values(records: Iterable[Record], name: str) -> list[float]:
    """Returns the values of the field `name` that are finite."""
    return [value for record in records if (value := finite(record, name)) is not None]


def rank_files(path: Path) -> dict[int, Path]:
    """Returns the metrics files of a run folder by rank."""
    files = {0: path / EVENTS_NAME}
    for file in path.iterdir():
        if matched := _RANK_NAME.fullmatch(file.name):
            files[int(matched[1])] = file
    return dict(sorted(files.items()))


def assemble(path: Path, ranks: Mapping[int, Records]) -> RunFiles:
    """Builds a `RunFiles` from records and the other files of the folder.

    Raises:
        DataError: If a file is damaged.
        OSError: If a file cannot be read.
    """
    summary = _read_table(path / "summary.json", "JSON", parse_json)
    config = _read_table(path / "config.toml", "TOML", parse_toml) or {}
    ends = [record["event"] for record in ranks[0].events if record["event"] in ("start", "stop")]
    if "stop" in ends and ends[-1] == "start":
        summary = None  # outdated: the run was resumed after its end
    return RunFiles(path, dict(ranks), summary, config)


def parse_line(line: bytes, file: Path, number: int) -> Record:
    """Parses and checks one line of a metrics file."""
    return _with_step(parse_event(line, file, number), file, number)


def _checked(file: Path) -> Iterable[Record]:
    for number, record in enumerate(read_events(file), start=1):
        yield _with_step(record, file, number)


def _with_step(record: Record, file: Path, number: int) -> Record:
    if not is_count(record.get("step", None if record["event"] in _WITH_STEP else 0)):
        raise DataError(
            f"{file}: step of line {number} is not a whole number",
            "restore the file, or delete that line",
        )
    return record


def _check_folder(path: Path) -> None:
    remedy = "give the folder that `paceline train --output` wrote"
    if not path.exists():
        raise DataError(f"run folder {path} does not exist", remedy)
    if not path.is_dir():
        raise DataError(f"{path} is not a folder", remedy)
    if (path / EVENTS_NAME).is_file():
        return
    runs = list(path.glob(f"*/{EVENTS_NAME}"))
    if runs:
        newest = max(runs, key=lambda file: file.stat().st_mtime)
        remedy = f"did you mean {newest.parent}?"
    raise DataError(f"{path} is not a run folder: it has no {EVENTS_NAME}", remedy)


def _read_table(file: Path, kind: str, parse: Callable[[bytes], Any]) -> Record | None:
    """Returns the keys and values in a TOML or JSON file, or None if there is no file."""
    if not file.exists():
        return None
    try:
        table = parse(read_regular(file))
    except ParseError as error:
        raise DataError(f"{file} is not {kind}: {error}", "restore it, or delete it") from error
    if not isinstance(table, dict):
        raise DataError(f"{file} has no keys and values", "restore it, or delete it")
    return table
