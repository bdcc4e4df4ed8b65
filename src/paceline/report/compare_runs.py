"""`ComparedRun`: one run of a comparison. `read_runs`: finds and reads the runs to compare.

A run that cannot be compared raises an error, because a table without it would mislead. The
exception is a run without an evaluation in a folder of runs: it is left out with a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import DataError
from paceline.report.live_run import run_folders
from paceline.report.outcome import Outcome
from paceline.report.records import finite, integer
from paceline.report.run_files import RunFiles
from paceline.report.tables import flat

# Settings in which the runs of one row may differ.
_NOT_COMPARED = frozenset({"run.seed", "run.name", "run.output", "run.resume"})
# The number of ranks is no setting, but it changes the speed and, through batch norm, the result.
RANKS = "ranks"
GLOBAL_BATCH = "run.global_batch_size"


class CompareError(DataError):
    """Raised if runs cannot be compared."""

    exit_code = 2


class NoEvaluationError(CompareError):
    """Raised if a run has started but has no evaluation yet."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison. `top1` and `val_loss` are from the last evaluation, not the best one."""

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
        """True if the run finished all epochs or reached its target."""
        return self.outcome.state == "finished"

    @classmethod
    def read(cls, path: Path) -> ComparedRun:
        """Reads a run folder.

        Raises:
            NoEvaluationError: If the run has no evaluation yet.
            CompareError: If the folder cannot be read or has no configuration.
        """
        try:
            files = RunFiles.read(path, first_rank_only=True)
        except DataError as error:
            raise CompareError(error.cause, error.remedy) from error
        outcome = Outcome.of(files)
        # A run writes its first records before its configuration.
        if outcome.top1 is None and (files.config or not (files.events or len(files.steps()))):
            raise NoEvaluationError(
                f"{path} has no evaluation yet",
                "wait for the first evaluation, or leave that run out",
            )
        if not files.config:
            raise CompareError(
                f"{path} has no config.toml, so its settings are unknown",
                "restore the file, or leave that run out",
            )
        assert outcome.top1 is not None
        settings = dict(flat(files.config))
        seed, epochs = integer(settings, "run.seed"), finite(settings, "run.epochs")
        used = {GLOBAL_BATCH: outcome.global_batch_size, RANKS: outcome.world_size}
        settings |= {name: value for name, value in used.items() if value is not None}
        return cls(
            path=path,
            files=files,
            outcome=outcome,
            settings={k: v for k, v in settings.items() if k not in _NOT_COMPARED},
            seed=seed,
            top1=outcome.top1,
            val_loss=_last_loss(files),
            epochs_planned=_epochs_of_start(files) if epochs is None else epochs,
        )


def read_runs(paths: Sequence[Path], notes: list[str] | None = None) -> list[ComparedRun]:
    """Reads the runs to compare. A run that is given twice is read once.

    Args:
        paths: Run folders, or folders of run folders.
        notes: Receives a line for each run that is left out because it has no evaluation yet.

    Returns:
        At least two runs, in the order of `paths`.

    Raises:
        CompareError: If a run cannot be compared, or if there are fewer than two runs.
    """
    folders, given = run_folders(paths), {path.resolve() for path in paths}
    runs, left_out = [], []
    for folder in folders:
        try:
            runs.append(ComparedRun.read(folder))
        except NoEvaluationError as error:
            if folder.resolve() in given:
                raise
            left_out.append(f"left out: {error.cause}")
    if len(runs) < 2:
        only = next((run.path for run in runs), folders[0])
        others = f" ({'; '.join(left_out)})" if left_out else ""
        raise CompareError(
            f"compare needs at least two runs, but {only} is the only one{others}",
            f"add a run, or use `paceline report {only}`",
        )
    if notes is not None:
        notes += left_out
    return runs


def _last_loss(files: RunFiles) -> float | None:
    """Returns the last validation loss; None if the last loss is not finite or unknown."""
    evaluations = files.of_kind("eval")
    if not evaluations:
        return finite(files.summary or {}, "val_loss")
    return finite(max(evaluations, key=lambda record: int(record["step"])), "loss")


def _epochs_of_start(files: RunFiles) -> float | None:
    steps, per_epoch = finite(files.start, "total_steps"), finite(files.start, "steps_per_epoch")
    return steps / per_epoch if steps and per_epoch else None
