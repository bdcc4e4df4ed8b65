"""`ComparedRun`: one run of a comparison, and the search for runs in folders.

A run that cannot be compared is a `CompareError` that names it; leaving it out silently would falsify the
table. Runs below a folder of runs that have no evaluation yet are left out with a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.report.outcome import Outcome
from paceline.report.records import finite, integer
from paceline.report.run_files import EVENTS_NAME, RunFiles
from paceline.report.tables import flat

# Settings in which the runs of one row may differ.
SEED = "run.seed"
_NAMES_AND_PATHS = frozenset({"run.name", "run.output", "run.resume"})
# Not a setting, but it changes speed and, through batch norm, the result.
RANKS = "ranks"
GLOBAL_BATCH = "run.global_batch_size"


class CompareError(DataError):
    """Runs that cannot be compared."""

    exit_code = 2


class NoEvaluationError(CompareError):
    """A run that has started, but has no evaluation yet."""


@dataclass(frozen=True)
class ComparedRun:
    """`top1` and `val_loss` are those of the last evaluation, not of the best."""

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
        """Whether it did all its epochs, or reached its target."""
        return self.outcome.state == "finished"

    @classmethod
    def read(cls, path: Path) -> ComparedRun:
        try:
            files = RunFiles.read(path, first_rank_only=True)
        except DataError as error:
            raise CompareError(error.cause, error.remedy) from error
        outcome = Outcome.of(files)
        # A run writes its first records before its configuration.
        if outcome.top1 is None and (files.config or not (files.events or len(files.steps()))):
            raise NoEvaluationError(
                f"{path} has no evaluation yet", "wait for its first one, or leave that run out"
            )
        if not files.config:
            raise CompareError(
                f"{path} has no config.toml, so its settings are unknown",
                "restore the file, or leave that run out",
            )
        assert outcome.top1 is not None
        given = dict(flat(files.config))
        planned = finite(given, "run.epochs")
        return cls(
            path=path,
            files=files,
            outcome=outcome,
            settings=settings_of(files, outcome),
            seed=integer(given, SEED),
            top1=outcome.top1,
            val_loss=_last_loss(files),
            epochs_planned=planned if planned is not None else _epochs_of_start(files),
        )


def settings_of(files: RunFiles, outcome: Outcome) -> dict[str, Any]:
    """What can make a row of its own: all settings but seed, name and paths."""
    settings = dict(flat(files.config))
    known = {GLOBAL_BATCH: outcome.global_batch_size, RANKS: outcome.world_size}
    settings |= {name: value for name, value in known.items() if value is not None}
    return {k: v for k, v in settings.items() if k not in _NAMES_AND_PATHS | {SEED}}


def read_runs(paths: Sequence[Path], notes: list[str] | None = None) -> list[ComparedRun]:
    """The runs at `paths` (run folders, or folders of them), each once, in this order; at least two.

    `notes` receives a line for each run below a folder of runs that has no evaluation yet. Without
    `notes`, and for a run given by its own path, such a run is an error.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            # A run given twice, by itself and by its parent, must not be averaged with itself.
            folders.setdefault(folder.resolve(), folder)
    given = {path.resolve() for path in paths}
    runs, left_out = [], []
    for resolved, folder in folders.items():
        try:
            runs.append(ComparedRun.read(folder))
        except NoEvaluationError as error:
            if notes is None or resolved in given:
                raise
            left_out.append(f"left out: {error.cause}")
    if len(runs) < 2:
        only = next((run.path for run in runs), next(iter(folders.values())))
        others = f" ({'; '.join(left_out)})" if left_out else ""
        raise CompareError(
            f"compare needs two runs or more, and {only} is one{others}",
            f"add a run, or use `paceline report {only}`",
        )
    if notes is not None:
        notes += left_out
    return runs


def _run_folders(path: Path) -> list[Path]:
    """`path` itself, or the runs directly below it."""
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
            f"{path} is no run folder and holds none: no {EVENTS_NAME} in it or directly below it",
            "give folders that `paceline train --output` wrote",
        )
    return inside


def _last_loss(files: RunFiles) -> float | None:
    """None where the last loss is not finite: an earlier one must not replace it."""
    evaluations = files.of_kind("eval")
    if not evaluations:
        return finite(files.summary or {}, "val_loss")
    return finite(max(evaluations, key=lambda record: int(record["step"])), "loss")


def _epochs_of_start(files: RunFiles) -> float | None:
    steps, per_epoch = finite(files.start, "total_steps"), finite(files.start, "steps_per_epoch")
    return steps / per_epoch if steps and per_epoch else None
