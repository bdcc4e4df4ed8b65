"""`Comparison`: runs grouped into rows by their settings, with names and differences to a baseline.

The runs of a row differ in their seed alone. A row is named by the settings in which rows differ, as
few as distinguish them and say what each row switches on.
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
from paceline.report.outcome import ExtraFigure, Outcome

Settings = Mapping[str, Any]
_UNSET = "unset"
# The settings that best describe a row, first to last, and those that follow from others or matter for
# speed alone. The rest comes between them, by section.
_DESCRIPTIVE = (
    "optim.name", "model.name", GLOBAL_BATCH, "run.epochs", "optim.schedule", "optim.batch_schedule",
    "run.strategy", "comm.wire", "comm.algorithm",
)  # fmt: skip
_SECTIONS = (
    "optim", "precision", "model", "data", "run", "comm", RANKS, "checkpoint",
)  # fmt: skip
_MINOR = (
    "run.batch_size", "run.threads", "data.workers",
)  # fmt: skip
# Every label has those of these in which rows differ.
_ALWAYS = ("optim.name", GLOBAL_BATCH, "optim.lr", "optim.lr_base")
_WORDS = {"optim.name": "opt", "model.name": "model", GLOBAL_BATCH: "batch"}
# Where files are says little about a run.
_PATHS = (
    "data.dir", "data.cache_dir", "run.pretrained", "run.output", "run.resume", "comm.plan",
    "comm.hybrid.sizes",
)  # fmt: skip
# Values with which a setting switches nothing on, beside what is false, empty or unset.
_OFF = ("auto", "none", "off", "synchronous")


@dataclass(frozen=True)
class Spread:
    """Mean, sample standard deviation (None for a single value) and range."""

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
    """Times and speeds are medians over the runs, skipped steps their sum."""

    label: str
    runs: tuple[ComparedRun, ...]
    auto_label: str = ""
    difference: Difference | None = None

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
        """The mean; None where one run has no finite loss, because the mean of the others would
        mislead."""
        known = [run.val_loss for run in self.runs if run.val_loss is not None]
        return fmean(known) if len(known) == len(self.runs) else None

    def median(self, name: str) -> float | None:
        """The median of a figure of `Outcome` over the runs that have it."""
        return _median(getattr(run.outcome, name) for run in self.runs)

    @property
    def steps(self) -> float | None:
        """Updates."""
        return _median(run.outcome.steps or None for run in self.runs)

    @property
    def exposed_s(self) -> float | None:
        """Of a step; None for runs of one rank."""
        return _median(ExposedWaits.of(run.files).exposed_s for run in self.runs)

    @property
    def figures(self) -> dict[str, ExtraFigure]:
        """The medians of figures of extensions that have a column, by name."""
        every = [own for run in self.runs for own in run.outcome.figures if own.column]
        return {
            own.name: replace(own, value=_median(x.value for x in every if x.name == own.name))
            for own in every
        }

    @property
    def skipped_steps(self) -> int:
        return sum(run.outcome.skipped_steps for run in self.runs)

    @property
    def epochs_done(self) -> tuple[float, float]:
        """The fewest and the most of any run: one that reaches its target ends early."""
        done = [run.outcome.epochs or 0.0 for run in self.runs]
        return min(done), max(done)

    @property
    def epochs_planned(self) -> float | None:
        return self.runs[0].epochs_planned

    @property
    def outcome(self) -> Outcome:
        """Of the first run, for what is equal in all runs."""
        return self.runs[0].outcome

    @property
    def repeated_seeds(self) -> str:
        """`seed 0 in 2 runs`: repeats of a seed do not show how much the seed matters."""
        seeds = Counter(run.seed for run in self.runs)
        return ", ".join(f"seed {seed} in {plural(n, 'run')}" for seed, n in seeds.items() if n > 1)


def group_runs(runs: Iterable[ComparedRun]) -> list[CompareRow]:
    """Rows in the order of their first run, without labels. An incomplete run is a row of its own,
    because averages of complete and incomplete runs mean nothing."""
    groups: dict[object, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(identity(run.settings) if run.complete else run.path, []).append(run)
    return [CompareRow("", tuple(group)) for group in groups.values()]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


@dataclass(frozen=True)
class Comparison:
    """`differing` has all settings in which rows differ, `naming` those in the labels. `left_out` has a
    note for each run that is not in the table."""

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
        """`labels` have the form RUN=NAME; the default baseline is the first complete row."""
        rows = group_runs(runs)
        settings = [row.settings for row in rows]
        different = differing_settings(settings)
        names = naming_settings(settings, different)
        rows = _relabelled(_labelled(rows, names), labels)
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
        return cls(compared, chosen, tuple(different), tuple(names), tuple(left_out))

    @property
    def notes(self) -> list[str]:
        """What the table alone does not say."""
        notes = []
        if any(not row.complete for row in self.rows):
            notes.append("* not complete: the last evaluation so far, without a difference")
        if not self.baseline.complete:
            notes.append(f"no differences: the baseline {self.baseline.label} is not complete")
        unnamed = [name for name in self.differing if name not in self.naming]
        if unnamed:
            notes.append(f"the rows also differ in {', '.join(unnamed)}")
        notes += [
            f"{row.label}: {row.repeated_seeds}, so the spread is not that of seeds alone"
            for row in self.rows
            if row.repeated_seeds
        ]
        return [*notes, *self.left_out]


def _labelled(rows: Sequence[CompareRow], names: Sequence[str]) -> list[CompareRow]:
    """Incomplete rows of equal settings are distinguished by seed, else by folder."""
    # `run.name` is no setting of a row, but makes a plain `name` ambiguous.
    short = short_names([*(name for row in rows for name in row.settings), "run.name"])

    def label_of(row: CompareRow, shown: Sequence[str]) -> str:
        text = " ".join(f"{short[name]}={value_text(row.settings, name)}" for name in shown)
        return text or row.runs[0].outcome.name

    whole = [label_of(row, names) for row in rows]
    # What a row leaves off is said where the rest does not distinguish it from rows of other settings.
    brief = [label_of(row, [n for n in names if _acts(row.settings, n)] or names) for row in rows]
    others: dict[str, set[str]] = {}
    for text, full in zip(brief, whole, strict=True):
        others.setdefault(text, set()).add(full)
    plain = [
        text if len(others[text]) == 1 else full for text, full in zip(brief, whole, strict=True)
    ]
    by_seed = [
        text if row.complete else f"{text} seed={row.runs[0].seed}"
        for text, row in zip(plain, rows, strict=True)
    ]
    labelled = []
    for row, text, seeded in zip(rows, plain, by_seed, strict=True):
        label = text
        if not row.complete and plain.count(text) > 1:
            unique = by_seed.count(seeded) == 1
            label = seeded if unique else f"{text} run={text_of(row.runs[0].path)}"
        labelled.append(replace(row, label=label, auto_label=label))
    return labelled


def _relabelled(rows: Sequence[CompareRow], labels: Sequence[str]) -> list[CompareRow]:
    named = list(rows)
    for text in labels:
        # An automatic label holds `=` too, so the last one separates the new name.
        key, equals, name = text.rpartition("=")
        if not equals or not key.strip() or not name.strip():
            raise ConfigError("--label", text, "is not of the form RUN=NAME")
        i = _find(rows, key, "--label", text)
        named[i] = replace(named[i], label=text_of(name))
        if sum(row.label == named[i].label for row in named) > 1:
            raise ConfigError("--label", text, "is the name of another row", "choose another name")
    return named


def _find(rows: Sequence[CompareRow], key: str, option: str, given: str) -> int:
    """The row with the label `key`, or of the run with that path or folder name."""
    for i, row in enumerate(rows):
        if key in (row.label, row.auto_label):
            return i
    path = Path(key).resolve()
    by_path = [i for i, row in enumerate(rows) for run in row.runs if run.path.resolve() == path]
    by_name = [i for i, row in enumerate(rows) for run in row.runs if run.path.name == key]
    found = set(by_path or by_name)
    if len(found) > 1:
        raise ConfigError(option, given, "is a run of several rows", "give the path of the run")
    if not found:
        known = [row.label for row in rows] + [run.path.name for row in rows for run in row.runs]
        raise ConfigError(option, given, "names no row and no run", nearest(key, known))
    return found.pop()


def identity(settings: Settings) -> str:
    """Equal for equal settings, whatever their order; 1 and 1.0 are equal."""
    return json.dumps({key: _plain(value) for key, value in settings.items()}, sort_keys=True)


def differing_settings(rows: Sequence[Settings]) -> list[str]:
    """The settings that are not equal in all rows, the most descriptive first."""
    names = {name: None for settings in rows for name in settings}
    return sorted((name for name in names if _distinct(rows, [name]) > 1), key=_priority)


def naming_settings(rows: Sequence[Settings], different: Sequence[str]) -> list[str]:
    """Optimizer, batch and rate, if rows differ in them, and as few others of `different`, the most
    descriptive first, as distinguish the rows as well as all of them, and say what is switched on in
    each row. No other setting replaces a descriptive one, and paths are used where nothing else
    distinguishes the rows."""
    acting = {name for name in different if any(_acts(settings, name) for settings in rows)}
    described = [name for name in different if name in _DESCRIPTIVE and name in acting]
    switches = [name for name in different if _is_switch(rows, name)]
    first = _fewest(rows, described, _droppable(reversed(described)), switches)
    # A text such as an optimizer's name says as much of its row as a switch.
    texts = [name for name in first if not _has_number(rows, name)]
    others = [name for name in different if name not in described]
    useful = [name for name in others if name in acting and name not in _PATHS]
    droppable = [*(name for name in others if name not in useful), *reversed(useful)]
    return _fewest(rows, [*first, *others], _droppable(droppable), [*switches, *texts])


def _droppable(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in _ALWAYS]


def _fewest(
    rows: Sequence[Settings], names: Sequence[str], droppable: Iterable[str], telling: Sequence[str]
) -> list[str]:
    """`names` without those of `droppable`, in this order, that neither distinguish rows nor are the last
    of `telling` to be on in a row."""

    def count_told(shown: Sequence[str]) -> int:
        kept = [name for name in telling if name in shown]
        return sum(any(_acts(settings, name) for name in kept) for settings in rows)

    chosen = list(names)
    distinct, told = _distinct(rows, names), count_told(names)
    for name in droppable:
        fewer = [other for other in chosen if other != name]
        if _distinct(rows, fewer) == distinct and count_told(fewer) == told:
            chosen = fewer
    return chosen


def _is_switch(rows: Sequence[Settings], name: str) -> bool:
    """Whether the setting is on in some rows, and off or without effect in others. A name or a path that
    every row has, and a number, switch nothing on."""
    if name in _PATHS or _has_number(rows, name):
        return False
    return len({_acts(settings, name) for settings in rows}) == 2


def _has_number(rows: Sequence[Settings], name: str) -> bool:
    return any(_is_number(settings.get(name)) for settings in rows)


def _acts(settings: Settings, name: str) -> bool:
    """Whether the setting is a number, or switched on, and has an effect in this run."""
    section, value = name.partition(".")[0], settings.get(name)
    if settings.get(RANKS) == 1 and (section == "comm" or name == "run.strategy"):
        return False
    return _is_number(value) or (bool(value) and value not in _OFF)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """`optim.name` → `opt`; `optim.momentum` → `momentum`, unless another section has one of its name."""
    known = list(dict.fromkeys(names))
    sections = Counter(name.rpartition(".")[2] for name in known)
    short = {name: key if sections[key := name.rpartition(".")[2]] == 1 else name for name in known}
    return short | {name: word for name, word in _WORDS.items() if name in short}


def value_text(settings: Settings, name: str) -> str:
    """A value without spaces; TOML leaves out what is unset."""
    if name not in settings:
        return _UNSET
    value = settings[name]
    if isinstance(value, list | tuple):
        return f"[{','.join(text_of(item) for item in value)}]"
    if isinstance(value, float):  # in full: two rows that differ must not look equal
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return '""' if value == "" else text_of(value)


def _distinct(rows: Sequence[Settings], names: Sequence[str]) -> int:
    def value(settings: Settings, name: str) -> str:
        return json.dumps(_plain(settings[name])) if name in settings else _UNSET

    return len({tuple(value(settings, name) for name in names) for settings in rows})


def _plain(value: Any) -> Any:
    """A value that JSON can hold: dates of TOML as text, whole numbers as floats."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, int | float) else str(value)


def _priority(name: str) -> tuple[int, int, str]:
    if name in _DESCRIPTIVE:
        return 0, _DESCRIPTIVE.index(name), name
    if name in _MINOR:
        return 2, _MINOR.index(name), name
    section = name.partition(".")[0]
    return 1, _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), name
