"""`ComparedRun`: one run as a comparison sees it, and how runs are found.

In: paths: run folders, or folders whose sub-folders are runs. Out: the runs, each once, in the order
given. Whatever is wrong with one of them is a `CompareError` that names it: a table that leaves a run
out in silence would be a wrong table. Of a folder of runs, those that have no evaluation yet are left
out, each with a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.report.outcome import Outcome
from paceline.report.quantities import many, shown
from paceline.report.run_files import EVENTS_NAME, RunFiles, finite, whole
from paceline.report.tables import flat

# Runs that differ in these alone are seeds of one row.
SEED = "run.seed"
_NAMES_AND_PLACES = frozenset({"run.name", "run.output", "run.resume"})
# Not a setting, yet it changes speed and, by batch norm, the result.
RANKS = "ranks"
GLOBAL_BATCH = "run.global_batch_size"


class CompareError(DataError):
    """Runs that cannot be compared as they were given."""

    exit_code = 2


class NoEvaluationError(CompareError):
    """A run that has begun, and has no evaluation yet."""


@dataclass(frozen=True)
class ComparedRun:
    """A run with its settings and its figures. `top1` is of the last evaluation, never of the best."""

    path: Path
    files: RunFiles
    outcome: Outcome
    settings: dict[str, Any]
    seed: int | None
    top1: float
    val_loss: float | None
    epochs_planned: float | None

    @property
    def complete(self) -> bool:
        """Whether it did what it was asked to: all its epochs, or its target."""
        return self.outcome.state == "finished"

    @classmethod
    def read(cls, path: Path) -> ComparedRun:
        try:
            files = RunFiles.read(path, first_rank_only=True)
        except DataError as error:
            raise CompareError(error.cause, error.remedy) from error
        outcome = Outcome.of(files)
        # A run writes its first records before its configuration.
        if outcome.top1 is None and (files.config or not files.events):
            raise NoEvaluationError(
                f"{path} has no evaluation yet", "wait for its first one, or leave that run out"
            )
        if not files.config:
            raise CompareError(
                f"{path} has no config.toml, so nobody knows what differs in it",
                "restore the file, or leave that run out",
            )
        assert outcome.top1 is not None
        settings = dict(flat(files.config))
        seed, planned = settings.get(SEED), finite(settings, "run.epochs")
        known = {GLOBAL_BATCH: outcome.global_batch_size, RANKS: outcome.world_size}
        settings |= {name: value for name, value in known.items() if value is not None}
        return cls(
            path=path,
            files=files,
            outcome=outcome,
            settings={k: v for k, v in settings.items() if k not in _NAMES_AND_PLACES | {SEED}},
            seed=whole({"seed": seed}, "seed"),
            top1=outcome.top1,
            val_loss=_last_loss(files),
            epochs_planned=planned if planned is not None else _epochs_of_start(files),
        )


def read_runs(paths: Sequence[Path], notes: list[str] | None = None) -> list[ComparedRun]:
    """The runs at `paths`, at least two of them.

    `notes` takes a line for each run of a folder of runs that has no evaluation yet; without it, and for
    a run that is given by its own path, that is an error.
    """
    folders: dict[Path, Path] = {}
    named = {path.resolve() for path in paths}
    for path in paths:
        for folder in _run_folders(path):
            # Given twice, by itself and by its parent, it must not be averaged with itself.
            folders.setdefault(folder.resolve(), folder)
    runs, young = [], []
    for resolved, folder in folders.items():
        try:
            runs.append(ComparedRun.read(folder))
        except NoEvaluationError as error:
            if notes is None or resolved in named:
                raise
            young.append(f"left out: {error.cause}")
    if len(runs) < 2:
        only = next((run.path for run in runs), next(iter(folders.values())))
        others = f" ({'; '.join(young)})" if young else ""
        raise CompareError(
            f"compare needs two runs or more, and {only} is one{others}",
            f"add a run, or use `paceline report {only}`",
        )
    if notes is not None:
        notes += young
    return runs


def repeated_seeds(runs: Iterable[ComparedRun]) -> str:
    """`seed 0 in 2 runs`: repeats of one seed do not show how much the seed matters."""
    counts: dict[int | None, int] = {}
    for run in runs:
        counts[run.seed] = counts.get(run.seed, 0) + 1
    told = (f"seed {seed} in {many(n, 'run')}" for seed, n in counts.items() if n > 1)
    return ", ".join(told)


def _run_folders(path: Path) -> list[Path]:
    """`path` itself, or the runs right below it."""
    try:
        if not path.is_dir() or (path / EVENTS_NAME).is_file():
            return [path]
        inside = sorted(child for child in path.iterdir() if (child / EVENTS_NAME).is_file())
    except OSError as error:
        raise CompareError(
            f"{error.filename or path} cannot be read: {error.strerror}", "check its permissions"
        ) from error
    if not inside:
        raise CompareError(
            f"{path} is no run folder and holds none: no {EVENTS_NAME} in it or right below it",
            "give folders that `paceline train --output` wrote",
        )
    return inside


def _last_loss(files: RunFiles) -> float | None:
    """Of the last evaluation alone: where its loss is no number, an earlier one must not stand in."""
    evaluations = files.of_kind("eval")
    if not evaluations:
        return finite(files.summary or {}, "val_loss")
    return finite(max(evaluations, key=lambda record: int(record["step"])), "loss")


def _epochs_of_start(files: RunFiles) -> float | None:
    start = (files.of_kind("start") or [{}])[-1]
    steps, an_epoch = finite(start, "total_steps"), finite(start, "steps_per_epoch")
    return steps / an_epoch if steps and an_epoch else None


# Names for the rows of a comparison: the settings in which the rows differ, as few as tell them
# apart.
#
# In: the settings of each row. Out: the names of those that differ, the few that name the rows, a
# label for each row, and what all rows have in common.


Settings = Mapping[str, Any]

UNSET = "unset"
# Where several settings would name the rows alike, the earliest here does: what a reader thinks in.
_TELLING = ("optim.name", "model.name", GLOBAL_BATCH, "run.epochs")
_SECTIONS = ("optim", "precision", "model", "data", "run", "comm", RANKS, "checkpoint")
# Follow from others, or matter for speed alone.
_DULL = ("run.batch_size", "run.threads", "data.workers", "data.prefetch_batches")


def identity(settings: Settings) -> str:
    """Equal for equal settings, whatever their order; 1 and 1.0 are the same."""
    return json.dumps({key: _plain(value) for key, value in settings.items()}, sort_keys=True)


def differing(rows: Sequence[Settings]) -> list[str]:
    """The settings that are not the same in all rows, the most telling first."""
    names = {name: None for settings in rows for name in settings}
    return sorted(
        (name for name in names if len({_value(settings, name) for settings in rows}) > 1),
        key=_dullness,
    )


def naming(rows: Sequence[Settings], different: Sequence[str]) -> list[str]:
    """The few of `different` that tell all rows apart that all of them do."""
    chosen = list(different)
    apart = _distinct(rows, chosen)
    for name in reversed(different):
        fewer = [other for other in chosen if other != name]
        if _distinct(rows, fewer) == apart:
            chosen = fewer
    return chosen


def label(settings: Settings, names: Sequence[str], short: Mapping[str, str]) -> str:
    """`optim.name=lars global_batch_size=2500`."""
    return " ".join(f"{short[name]}={value_text(settings, name)}" for name in names)


def short_names(known: Iterable[str]) -> dict[str, str]:
    """`optim.momentum` → `momentum`, unless another section has a setting of that name."""
    names = list(known)
    last = [name.rpartition(".")[2] for name in names]
    return {
        name: key if last.count(key) == 1 else name for name, key in zip(names, last, strict=True)
    }


def value_text(settings: Settings, name: str) -> str:
    """A value in one word; one that TOML leaves out because it is unset is called so."""
    if name not in settings:
        return UNSET
    value = settings[name]
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(item) for item in value)}]"
    if isinstance(value, float):  # in full: two rows that differ must not read alike
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return '""' if value == "" else shown(value)


def _distinct(rows: Sequence[Settings], names: Sequence[str]) -> int:
    return len({tuple(_value(settings, name) for name in names) for settings in rows})


def _value(settings: Settings, name: str) -> str:
    return json.dumps(_plain(settings[name])) if name in settings else UNSET


def _plain(value: Any) -> Any:
    """What JSON can hold: dates of TOML as text, whole numbers as the floats they stand for."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    return float(value) if isinstance(value, int | float) else str(value)


def _dullness(name: str) -> tuple[int, int, str]:
    if name in _TELLING:
        return 0, _TELLING.index(name), name
    if name in _DULL:
        return 2, _DULL.index(name), name
    section = name.partition(".")[0]
    return 1, _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS), name
