"""`Outcome`: what came of a run, or what it has come to so far.

In: a `RunFiles`. Out: the figures that the terminal and the page show, from the summary where there
is one, else from the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.report.quantities import shown
from paceline.report.run_files import RunFiles, eval_points, finite, median, step_points, whole

# Reasons with which a run leaves the loop that mean: it did what it was asked to.
_DONE = frozenset({"finished", "target"})


@dataclass(frozen=True)
class Outcome:
    """The figures of a run; None where one is not known. `state`: finished, stopped, unfinished."""

    name: str
    state: str
    stopped_by: str | None
    top1: float | None
    top5: float | None
    best_top1: float | None
    images_per_s: float | None
    train_s: float | None
    time_to_target_s: float | None
    epochs: float | None
    steps: int
    total_steps: int | None
    world_size: int | None
    global_batch_size: int | None
    corrupt_samples: int
    corrupt_val_samples: int
    skipped_steps: int
    steps_without_loss: int
    resumes: int
    read_retries: int
    damaged_cache_entries: int

    @classmethod
    def of(cls, run: RunFiles) -> Outcome:
        summary = run.summary or {}
        steps, evals = run.of_kind("step"), run.of_kind("eval")
        start = (run.of_kind("start") or [{}])[-1]
        top1, top5 = eval_points(run, "top1"), eval_points(run, "top5")
        speeds = [point.value for point in step_points(run, "images_per_s")]
        stopped_by = _stopped_by(run)
        counters = summary.get("input_counters")
        counters = counters if isinstance(counters, dict) else {}
        losses_missing = sum(finite(record, "loss") is None for record in steps)
        last = max([*steps, *evals], key=lambda record: int(record["step"]), default={})

        def first(name: str, otherwise: float | None) -> float | None:
            known = finite(summary, name)
            return otherwise if known is None else known

        return cls(
            name=_name(run),
            state=_state(run, stopped_by),
            stopped_by=stopped_by,
            top1=first("top1", top1[-1].value if top1 else None),
            top5=first("top5", top5[-1].value if top5 else None),
            best_top1=max((point.value for point in top1), default=None),
            images_per_s=first("images_per_s", median(speeds) if speeds else None),
            train_s=first("train_s", _elapsed_s(run)),
            time_to_target_s=finite(summary, "time_to_target_s"),
            epochs=first("epochs", finite(last, "epoch")),
            steps=whole(summary, "steps") or int(last.get("step", 0)),
            total_steps=whole(start, "total_steps"),
            world_size=whole(summary, "world_size") or whole(start, "world_size"),
            global_batch_size=whole(summary, "global_batch_size")
            or whole(start, "global_batch_size"),
            corrupt_samples=_corrupt_count(run, "corrupt_samples", "train"),
            corrupt_val_samples=_corrupt_count(run, "corrupt_val_samples", "val"),
            skipped_steps=sum(record.get("skipped") is True for record in steps),
            steps_without_loss=losses_missing,
            resumes=len(run.resumes),
            read_retries=whole(counters, "read_retries") or 0,
            damaged_cache_entries=whole(counters, "cache_damaged") or 0,
        )


def _corrupt_count(run: RunFiles, field: str, split: str) -> int:
    """The summary's exact count; before there is one, the names, which ranks may share."""
    known = whole(run.summary or {}, field)
    if known is not None:
        return known
    return len(
        {
            shown(record.get("name"))
            for rank in run.ranks
            for record in run.of_kind("corrupt", rank)
            if record.get("split", "train") == split
        }
    )


def _stopped_by(run: RunFiles) -> str | None:
    """Why the last process left the loop; None while it is in it, or was killed there."""
    told = (run.summary or {}).get("stopped_by")
    if told is None:
        ends = [record for record in run.events if record["event"] in ("start", "stop")]
        if ends and ends[-1]["event"] == "stop":
            told = ends[-1].get("reason")
    return None if told is None else shown(told)


def _state(run: RunFiles, stopped_by: str | None) -> str:
    if stopped_by is not None:
        return "finished" if stopped_by in _DONE else "stopped"
    return "unfinished" if run.summary is None else "finished"


def _name(run: RunFiles) -> str:
    """The recipe's name; a recipe given as a file goes by the file's name."""
    settings = run.config.get("run")
    named = [
        (run.summary or {}).get("recipe"),
        settings.get("name") if isinstance(settings, dict) else None,
    ]
    for recipe in named:
        if isinstance(recipe, str) and recipe.strip():
            return shown(recipe.removesuffix(".toml").replace("\\", "/").rpartition("/")[2])
    return shown(Path(run.path).resolve().name)


def _elapsed_s(run: RunFiles) -> float | None:
    """From each start to the last record before the next one: pauses between them do not count."""
    total, began, latest, known = 0.0, None, 0.0, False
    for record in run.events:
        now = finite(record, "time")
        if now is None:
            continue
        if record["event"] == "start":
            total += latest - began if began is not None else 0.0
            began, known = now, True
        latest = now
    return total + latest - began if known and began is not None else None
