"""`Comparison`: runs grouped into rows by their settings, with labels and differences to a baseline.

The runs of a row differ only in the seed. The label of a row contains the settings in which this row
differs from the other rows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from paceline.core.errors import ConfigError, nearest
from paceline.core.units import plural, text_of
from paceline.report.bottleneck import ExposedWaits
from paceline.report.compare_runs import GLOBAL_BATCH, RANKS, ComparedRun
from paceline.report.outcome import ExtraFigure

Settings = Mapping[str, Any]
_UNSET = "unset"
# The settings that describe a row best, and the settings that describe a row least.
_DESCRIPTIVE = (
    "optim.name", "model.name", GLOBAL_BATCH, "run.epochs", "optim.schedule", "optim.batch_schedule",
    "run.strategy", "comm.wire", "comm.algorithm", "optim.lr", "optim.lr_base",
)  # fmt: skip
_LEAST_DESCRIPTIVE = (
    "run.batch_size", "run.threads", "data.workers", "data.dir", "data.cache_dir", "run.pretrained",
    "comm.plan", "comm.hybrid.sizes",
)  # fmt: skip
_SECTIONS = ("optim", "precision", "model", "data", "run", "comm", RANKS, "checkpoint")
# If rows differ in one of these settings, every label shows that setting.
_ALWAYS = ("optim.name", GLOBAL_BATCH, "optim.lr", "optim.lr_base")
_SHORT_NAMES = {"optim.name": "opt", "model.name": "model", GLOBAL_BATCH: "batch"}


@dataclass(frozen=True)
class Spread:
    """Number, mean, sample standard deviation (None for one value) and range of some values."""

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
    """The difference between the top-1 accuracies of a row and the baseline, in percentage points.

    The standard error is None unless both rows have at least two runs.
    """

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
    """A row of the comparison: runs that differ only in their seed.

    Times and speeds are medians over the runs.
    """

    label: str
    runs: tuple[ComparedRun, ...]
    difference: Difference | None = None

    @property
    def first(self) -> ComparedRun:
        """The first run of the row, for properties that all its runs share."""
        return self.runs[0]

    @property
    def complete(self) -> bool:
        return self.first.complete

    @cached_property
    def top1(self) -> Spread:
        return Spread.of([run.top1 for run in self.runs])

    @property
    def val_loss(self) -> float | None:
        """The mean validation loss; None if the loss of any run is unknown.

        A mean of the remaining runs would mislead.
        """
        losses = [run.val_loss for run in self.runs if run.val_loss is not None]
        return fmean(losses) if len(losses) == len(self.runs) else None

    def median(self, name: str) -> float | None:
        """Returns the median of an attribute of `Outcome` over the runs that have a value."""
        return _median(getattr(run.outcome, name) for run in self.runs)

    @property
    def exposed_s(self) -> float | None:
        """The median seconds per step of communication that backward does not hide; None for one rank."""
        return _median(ExposedWaits.of(run.files).exposed_s for run in self.runs)

    @property
    def figures(self) -> dict[str, ExtraFigure]:
        """The medians of the figures of extensions that have a column, by name."""
        shown = [figure for run in self.runs for figure in run.outcome.figures if figure.column]
        return {
            figure.name: replace(
                figure, value=_median(x.value for x in shown if x.name == figure.name)
            )
            for figure in shown
        }

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps of all runs together."""
        return sum(run.outcome.skipped_steps for run in self.runs)

    @property
    def epochs_done(self) -> tuple[float, float]:
        """The fewest and the most epochs of any run; they differ if a run ends early at its target."""
        done = [run.outcome.epochs or 0.0 for run in self.runs]
        return min(done), max(done)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Comparison:
    """The compared runs, grouped into rows.

    Attributes:
        rows: The rows in the order of their first runs.
        baseline: The row that all other rows are compared with.
        differing: All settings in which rows differ, the most descriptive first.
        naming: The settings that are part of the row labels.
        renamed: True if the user gave names to rows.
        left_out: A note for each run that is not in the table.
    """

    rows: tuple[CompareRow, ...]
    baseline: CompareRow
    differing: tuple[str, ...]
    naming: tuple[str, ...]
    renamed: bool = False
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        runs: Sequence[ComparedRun],
        labels: Sequence[str] = (),
        baseline: str | None = None,
        left_out: Sequence[str] = (),
    ) -> Comparison:
        """Groups runs into rows.

        Args:
            runs: The runs to compare.
            labels: Names for rows, in the form RUN=NAME.
            baseline: The label or a run of the baseline row; the first complete row by default.
            left_out: Notes about runs that are not in the table.

        Raises:
            ConfigError: If a label or the baseline is invalid.
        """
        rows = group_runs(runs)
        settings = [row.first.settings for row in rows]
        different = differing_settings(settings)
        names = naming_settings(settings, different)
        rows = _renamed(_labelled(rows, names), labels)
        if baseline is not None:
            chosen = rows[_find(rows, baseline, "--baseline", baseline)]
        else:
            chosen = next((row for row in rows if row.complete), rows[0])
        compared = tuple(
            replace(row, difference=Difference.between(row.top1, chosen.top1))
            if row is not chosen and row.complete and chosen.complete
            else row
            for row in rows
        )
        return cls(compared, chosen, tuple(different), tuple(names), bool(labels), tuple(left_out))

    @property
    def notes(self) -> list[str]:
        """Notes that are shown below the table."""
        notes = []
        if any(not row.complete for row in self.rows):
            notes.append("* not complete: the last evaluation so far, without a difference")
        if not self.baseline.complete:
            notes.append(f"no differences: the baseline {self.baseline.label} is not complete")
        unnamed = [name for name in self.differing if name not in self.naming]
        if unnamed:
            notes.append(f"the rows also differ in {', '.join(unnamed)}")
        for row in self.rows:
            seeds = Counter(run.seed for run in row.runs)
            repeated = [f"seed {seed} in {plural(n, 'run')}" for seed, n in seeds.items() if n > 1]
            if repeated:
                notes.append(
                    f"{row.label}: {', '.join(repeated)}, so the spread is not only that of seeds"
                )
        return [*notes, *self.left_out]


def group_runs(runs: Iterable[ComparedRun]) -> list[CompareRow]:
    """Groups runs with equal settings into rows without labels.

    Each incomplete run has its own row, because a mean of incomplete and complete runs is meaningless.
    """
    groups: dict[object, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(identity(run.settings) if run.complete else run.path, []).append(run)
    return [CompareRow("", tuple(group)) for group in groups.values()]


def _labelled(rows: Sequence[CompareRow], names: Sequence[str]) -> list[CompareRow]:
    """Gives each row a label with the settings that distinguish it.

    The label of an incomplete run also contains its folder.
    """
    short = _short_names(name for row in rows for name in row.first.settings)
    labelled = []
    for row in rows:
        words = [f"{short[name]}={value_text(row.first.settings, name)}" for name in names]
        words = words or [row.first.outcome.name]
        if not row.complete:
            words.append(f"run={text_of(row.first.path)}")
        labelled.append(replace(row, label=" ".join(words)))
    return labelled


def _renamed(rows: Sequence[CompareRow], labels: Sequence[str]) -> list[CompareRow]:
    """Gives rows the names that the user chose with RUN=NAME."""
    renamed = list(rows)
    for text in labels:
        key, equals, name = text.rpartition("=")  # a path may contain `=`, too
        if not equals or not key.strip() or not name.strip():
            raise ConfigError("--label", text, "is not of the form RUN=NAME")
        i = _find(rows, key, "--label", text)
        if text_of(name) in [row.label for row in renamed]:
            raise ConfigError("--label", text, "is the name of another row", "choose another name")
        renamed[i] = replace(renamed[i], label=text_of(name))
    return renamed


def _find(rows: Sequence[CompareRow], key: str, option: str, given: str) -> int:
    """Returns the index of the row that `key` names: a label, or the path or folder of a run."""
    path = Path(key).resolve()
    runs = [(i, run.path) for i, row in enumerate(rows) for run in row.runs]
    matches = {i for i, row in enumerate(rows) if row.label == key}
    matches = matches or {i for i, run in runs if run.resolve() == path}
    matches = matches or {i for i, run in runs if run.name == key}
    if len(matches) > 1:
        raise ConfigError(option, given, "matches runs in several rows", "give the path of the run")
    if not matches:
        known = [*(row.label for row in rows), *(run.name for _, run in runs)]
        raise ConfigError(option, given, "names no row and no run", nearest(key, known))
    return matches.pop()


def identity(settings: Settings) -> str:
    """Returns a key by which runs are grouped: equal settings in any order have equal keys."""
    return json.dumps({key: _plain(value) for key, value in settings.items()}, sort_keys=True)


def differing_settings(rows: Sequence[Settings]) -> list[str]:
    """Returns the settings that are not equal in all rows, the most descriptive first."""
    names = {name: None for settings in rows for name in settings}
    return sorted((name for name in names if _distinct(rows, [name]) > 1), key=_priority)


def naming_settings(rows: Sequence[Settings], different: Sequence[str]) -> list[str]:
    """Chooses the settings to put into the row labels.

    Args:
        rows: The settings of each row.
        different: The result of `differing_settings`.

    Returns:
        Optimizer, batch and learning rate if rows differ in them, and each further setting that tells
        more rows apart. The most descriptive setting is first.
    """
    names = [name for name in different if name in _ALWAYS]
    for name in different:
        if _distinct(rows, [*names, name]) > _distinct(rows, names):
            names.append(name)
    return [name for name in different if name in names]


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Maps full names to short names: `optim.name` to `opt`, and unique last parts to themselves."""
    # `run.name` is not compared, but makes a plain `name` ambiguous.
    known = {*names, "run.name"}
    sections = Counter(name.rpartition(".")[2] for name in known)
    short = {name: key if sections[key := name.rpartition(".")[2]] == 1 else name for name in known}
    return short | _SHORT_NAMES


def value_text(settings: Settings, name: str) -> str:
    """Formats the value of a setting without spaces; `unset` if TOML omits the setting."""
    if name not in settings:
        return _UNSET
    value = settings[name]
    if isinstance(value, list | tuple):
        return f"[{','.join(text_of(item) for item in value)}]"
    if isinstance(value, float):  # show all digits, so that different rows do not look equal
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return '""' if value == "" else text_of(value)


def _distinct(rows: Sequence[Settings], names: Sequence[str]) -> int:
    """Returns how many different combinations of values the settings `names` have in the rows."""
    return len({identity({name: row[name] for name in names if name in row}) for row in rows})


def _plain(value: Any) -> Any:
    """Converts a TOML value to JSON: dates to text, integers to floats."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, int | float) else str(value)


def _priority(name: str) -> tuple[int, int, str]:
    if name in _DESCRIPTIVE:
        return 0, _DESCRIPTIVE.index(name), name
    if name in _LEAST_DESCRIPTIVE:
        return 2, _LEAST_DESCRIPTIVE.index(name), name
    section = name.partition(".")[0]
    return 1, _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), name
