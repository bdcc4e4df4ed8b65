"""`Comparison`: several runs side by side, as rows with a name each and one of them the baseline.

In: runs, names for rows, and which row is the baseline. Out: the rows with their differences, what
all of them have in common, and notes on what a reader might take for more than it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.report.compare_runs import (
    ComparedRun,
    differing,
    identity,
    label,
    naming,
    repeated_seeds,
    short_names,
)
from paceline.report.quantities import shown
from paceline.report.run_files import median

# `CompareRow`: the runs of one setting, and what they came to together.
#
# In: runs that differ in their seed alone. Out: their number, mean, spread and range. A run that
# has not done what it was asked to is a row of its own: the mean of a half and a whole run means
# nothing.


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None of a single value) and range."""

    n: int
    mean: float
    std: float | None
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        std = stdev(values) if len(values) > 1 else None
        return cls(len(values), fmean(values), std, min(values), max(values))


@dataclass(frozen=True)
class Difference:
    """To the baseline, in percentage points; the standard error where both have two seeds or more."""

    points: float
    standard_error: float | None

    @classmethod
    def between(cls, row: Spread, baseline: Spread) -> Difference:
        error = None
        if row.std is not None and baseline.std is not None:
            error = math.sqrt(row.std**2 / row.n + baseline.std**2 / baseline.n)
        return cls(row.mean - baseline.mean, error)


@dataclass(frozen=True)
class CompareRow:
    """One row of a comparison. Times and speeds are medians over its runs, steps skipped their sum."""

    label: str
    runs: tuple[ComparedRun, ...]
    auto_label: str = ""
    difference: Difference | None = field(default=None)

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    @property
    def complete(self) -> bool:
        return self.runs[0].complete

    @cached_property
    def top1(self) -> Spread:
        return Spread.of([run.top1 for run in self.runs])

    @property
    def val_loss(self) -> float | None:
        """The mean; None where one of the runs has none, as a mean of the others would flatter."""
        known = [run.val_loss for run in self.runs if run.val_loss is not None]
        return fmean(known) if len(known) == len(self.runs) else None

    @property
    def images_per_s(self) -> float | None:
        return _median(run.outcome.images_per_s for run in self.runs)

    @property
    def train_s(self) -> float | None:
        return _median(run.outcome.train_s for run in self.runs)

    @property
    def skipped_steps(self) -> int:
        return sum(run.outcome.skipped_steps for run in self.runs)

    @property
    def epochs_done(self) -> tuple[float, float]:
        """Of the run that did fewest, and of the one that did most: a target may end one early."""
        done = [run.outcome.epochs or 0.0 for run in self.runs]
        return min(done), max(done)

    @property
    def epochs_planned(self) -> float | None:
        return self.runs[0].epochs_planned

    @property
    def global_batch_size(self) -> int | None:
        return self.runs[0].outcome.global_batch_size

    @property
    def world_size(self) -> int | None:
        return self.runs[0].outcome.world_size


def grouped(runs: Iterable[ComparedRun]) -> list[CompareRow]:
    """Rows in the order of their first run, without names yet; an incomplete run stays alone."""
    groups: dict[object, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(identity(run.settings) if run.complete else run.path, []).append(run)
    return [CompareRow("", tuple(group)) for group in groups.values()]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Comparison:
    """`differing` are all settings in which rows differ; `naming` the few that their names show."""

    rows: tuple[CompareRow, ...]
    baseline: CompareRow
    differing: tuple[str, ...]
    naming: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        runs: Sequence[ComparedRun],
        labels: Sequence[str] = (),
        baseline: str | None = None,
        left_out: Sequence[str] = (),
    ) -> Comparison:
        """`labels` are of the form RUN=NAME; without a `baseline` it is the first complete row.
        `left_out` has a line for each run that is not in the table."""
        rows = grouped(runs)
        settings = [row.settings for row in rows]
        different = differing(settings)
        names = naming(settings, different)
        rows = _relabelled(_labelled(rows, names), labels)
        if baseline is not None:
            chosen = rows[_find(rows, baseline, "--baseline", baseline)]
        else:
            chosen = next((row for row in rows if row.complete), rows[0])
        compared = tuple(replace(row, difference=_difference(row, chosen)) for row in rows)
        first = compared[rows.index(chosen)]
        return cls(compared, first, tuple(different), tuple(names), tuple(left_out))

    @property
    def notes(self) -> list[str]:
        """What the table alone would not say."""
        notes = []
        if any(not row.complete for row in self.rows):
            notes.append("* not complete: the last evaluation so far, compared with nothing")
        if not self.baseline.complete:
            notes.append(f"no differences: the baseline {self.baseline.label} is not complete")
        unnamed = [name for name in self.differing if name not in self.naming]
        if unnamed:
            notes.append(f"the rows differ in {', '.join(unnamed)} too")
        for row in self.rows:
            if repeats := repeated_seeds(row.runs):
                notes.append(f"{row.label}: {repeats}, so the spread is not that of seeds alone")
        return [*notes, *self.left_out]


def _difference(row: CompareRow, baseline: CompareRow) -> Difference | None:
    if row is baseline or not row.complete or not baseline.complete:
        return None
    return Difference.between(row.top1, baseline.top1)


def _labelled(rows: Sequence[CompareRow], names: Sequence[str]) -> list[CompareRow]:
    """Rows with names of their own; incomplete ones of equal settings go by seed, else by folder."""
    # `name` alone says little, and each section has one.
    known = dict.fromkeys([*(name for row in rows for name in row.settings), "run.name"])
    short = short_names(known)
    plain = [label(row.settings, names, short) or row.runs[0].outcome.name for row in rows]
    by_seed = [
        text if row.complete else f"{text} seed={row.runs[0].seed}"
        for text, row in zip(plain, rows, strict=True)
    ]
    labelled = []
    for place, row in enumerate(rows):
        text = plain[place]
        if not row.complete and plain.count(text) > 1:
            alone = by_seed.count(by_seed[place]) == 1
            text = by_seed[place] if alone else f"{text} run={shown(row.runs[0].path)}"
        labelled.append(replace(row, label=text, auto_label=text))
    return labelled


def _relabelled(rows: Sequence[CompareRow], labels: Sequence[str]) -> list[CompareRow]:
    named = list(rows)
    for text in labels:
        # A row's own name holds `=` too, so the last one is where the new name begins.
        key, equals, name = text.rpartition("=")
        if not equals or not key.strip() or not name.strip():
            raise ConfigError("--label", text, "is not of the form RUN=NAME")
        place = _find(rows, key, "--label", text)
        named[place] = replace(named[place], label=shown(name))
        if sum(row.label == named[place].label for row in named) > 1:
            raise ConfigError("--label", text, "is the name of another row", "choose another name")
    return named


def _find(rows: Sequence[CompareRow], key: str, option: str, given: str) -> int:
    """The row called `key`, or that of the run with that path or that folder name."""
    for place, row in enumerate(rows):
        if key in (row.label, row.auto_label):
            return place
    path = Path(key)
    for same in (_is_path, _is_name):
        found = [
            place for place, row in enumerate(rows) if any(same(run, path) for run in row.runs)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError(option, given, "is a run of several rows", "give the path of the run")
    known = [row.label for row in rows] + [run.path.name for row in rows for run in row.runs]
    raise ConfigError(option, given, "names no row and no run", nearest(key, known))


def _is_path(run: ComparedRun, path: Path) -> bool:
    return run.path == path or run.path.resolve() == path.resolve()


def _is_name(run: ComparedRun, path: Path) -> bool:
    return run.path.name == str(path)
