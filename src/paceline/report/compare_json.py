"""A comparison as one JSON object, for scripts and records.

In: a `Comparison`. Out: plain tables: the caption, each row with all its numbers unrounded, and the
runs of each row. What is not known is null.
"""

from __future__ import annotations

from typing import Any

from paceline.report.compare_rows import CompareRow
from paceline.report.compare_runs import ComparedRun
from paceline.report.compare_table import caption
from paceline.report.comparison import Comparison


def json_object(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison; accuracies in percent, differences in points, times in seconds."""
    return {
        "caption": caption(comparison),
        "baseline": comparison.baseline.label,
        "differing": list(comparison.differing),
        "rows": [_row(row, comparison.differing) for row in comparison.rows],
        "notes": comparison.notes,
    }


def _row(row: CompareRow, differing: tuple[str, ...]) -> dict[str, Any]:
    low, high = row.epochs_done
    return {
        "label": row.label,
        "complete": row.complete,
        "settings": {name: row.settings.get(name) for name in differing},
        "n": row.top1.n,
        "seeds": [run.seed for run in row.runs],
        "top1_mean": row.top1.mean,
        "top1_std": row.top1.std,
        "top1_min": row.top1.low,
        "top1_max": row.top1.high,
        "difference_points": row.difference and row.difference.points,
        "difference_standard_error": row.difference and row.difference.standard_error,
        "val_loss_mean": row.val_loss,
        "images_per_s_median": row.images_per_s,
        "train_s_median": row.train_s,
        "epochs_done_min": low,
        "epochs_done_max": high,
        "epochs_planned": row.epochs_planned,
        "global_batch_size": row.global_batch_size,
        "world_size": row.world_size,
        "skipped_steps": row.skipped_steps,
        "runs": [_run(run) for run in row.runs],
    }


def _run(run: ComparedRun) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "path": str(run.path),
        "seed": run.seed,
        "state": outcome.state,
        "top1": run.top1,
        "val_loss": run.val_loss,
        "images_per_s": outcome.images_per_s,
        "train_s": outcome.train_s,
        "epochs": outcome.epochs,
        "skipped_steps": outcome.skipped_steps,
    }
