"""`CompareRow`: the runs of one setting, and what they came to together.

In: runs that differ in their seed alone. Out: their number, mean, spread and range. A run that has
not done what it was asked to is a row of its own: the mean of a half and a whole run means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from paceline.report.compare_labels import identity
from paceline.report.compare_runs import ComparedRun
from paceline.report.series import median


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
