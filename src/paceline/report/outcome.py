"""`Outcome`: the figures of a run, final or so far.

They come from the summary where there is one, else from the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.core.units import format_duration, format_percent
from paceline.report.quantities import count, plural, rate, text_of
from paceline.report.run_files import RunFiles, finite, integer

# Reasons to leave the training loop that mean success.
_DONE = frozenset({"finished", "target"})


@dataclass(frozen=True)
class Outcome:
    """None where a figure is unknown. `state` is finished, stopped or unfinished."""

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
    noise_scale: float | None = None
    state_bytes_per_parameter: float | None = None
    exchange_bytes_per_step: float | None = None

    @classmethod
    def of(cls, run: RunFiles) -> Outcome:
        return run.derived((cls,), lambda: cls._of(run))

    @classmethod
    def _of(cls, run: RunFiles) -> Outcome:
        summary, start, steps = run.summary or {}, run.start, run.of_kind("step")
        top1, top5 = run.points("eval", "top1"), run.points("eval", "top5")
        speeds, noise = run.values("step", "images_per_s"), run.values("step", "noise_scale")
        stopped_by = _stopped_by(run)
        counters = summary.get("input_counters")
        counters = counters if isinstance(counters, dict) else {}
        last = max([*steps, *run.of_kind("eval")], key=lambda r: int(r["step"]), default={})

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
            steps=integer(summary, "steps") or int(last.get("step", 0)),
            total_steps=integer(start, "total_steps"),
            world_size=integer(summary, "world_size") or integer(start, "world_size"),
            global_batch_size=integer(summary, "global_batch_size")
            or integer(start, "global_batch_size"),
            corrupt_samples=_corrupt_count(run, "corrupt_samples", "train"),
            corrupt_val_samples=_corrupt_count(run, "corrupt_val_samples", "val"),
            skipped_steps=sum(record.get("skipped") is True for record in steps),
            steps_without_loss=len(steps) - len(run.values("step", "loss")),
            resumes=len(run.resumes),
            read_retries=integer(counters, "read_retries") or 0,
            damaged_cache_entries=integer(counters, "cache_damaged") or 0,
            noise_scale=first("noise_scale", noise[-1] if noise else None),
            state_bytes_per_parameter=finite(summary, "state_bytes_per_parameter"),
            exchange_bytes_per_step=finite(summary, "exchange_bytes_per_step"),
        )


def verdict(run: RunFiles) -> str:
    """One line: `quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank`, or the progress so far."""
    outcome = Outcome.of(run)
    result = _result(outcome)
    if outcome.state == "finished":
        target = "target reached, " if outcome.stopped_by == "target" else ""
        return f"{outcome.name}: {target}{result or 'finished without an evaluation'}"
    where = f"at step {count(outcome.steps)}"
    if outcome.total_steps:
        share = 100 * outcome.steps / outcome.total_steps
        where += f" of {count(outcome.total_steps)} ({format_percent(share, 0)})"
    if outcome.state == "stopped":
        state = f"stopped by {outcome.stopped_by} {where}"
    elif outcome.steps:
        state = f"unfinished, {where}"
    else:
        state = "unfinished, no step recorded yet"
    return f"{outcome.name}: {state}" + (f"; so far {result}" if result else "")


def _result(outcome: Outcome) -> str:
    """Accuracy, time, speed and ranks, as far as they are known."""
    accuracy = "" if outcome.top1 is None else f"{format_percent(outcome.top1, 1)} top-1"
    timed = outcome.train_s is not None and outcome.steps
    parts = [
        " in ".join(filter(None, (accuracy, format_duration(outcome.train_s) if timed else "")))
    ]
    if outcome.images_per_s is not None:
        ranks = f" on {plural(outcome.world_size, 'rank')}" if outcome.world_size else ""
        parts.append(f"{rate(outcome.images_per_s)} images/s{ranks}")
    return ", ".join(filter(None, parts))


def _corrupt_count(run: RunFiles, field: str, split: str) -> int:
    """The summary's exact count; before there is one, the distinct names that ranks have reported."""
    known = integer(run.summary or {}, field)
    if known is not None:
        return known
    return len(
        {
            text_of(record.get("name"))
            for rank in run.ranks
            for record in run.of_kind("corrupt", rank)
            if record.get("split", "train") == split
        }
    )


def _stopped_by(run: RunFiles) -> str | None:
    """Why the last process left the loop; None while it is in it, or was killed there."""
    reason = (run.summary or {}).get("stopped_by")
    if reason is None:
        ends = [record for record in run.events if record["event"] in ("start", "stop")]
        if ends and ends[-1]["event"] == "stop":
            reason = ends[-1].get("reason")
    return None if reason is None else text_of(reason)


def _state(run: RunFiles, stopped_by: str | None) -> str:
    if stopped_by is not None:
        return "finished" if stopped_by in _DONE else "stopped"
    return "unfinished" if run.summary is None else "finished"


def _name(run: RunFiles) -> str:
    """The recipe's name, without folder and suffix where it is a file; else the folder's name."""
    settings = run.config.get("run")
    configured = settings.get("name") if isinstance(settings, dict) else None
    for recipe in ((run.summary or {}).get("recipe"), configured):
        if isinstance(recipe, str) and recipe.strip():
            return text_of(recipe.removesuffix(".toml").replace("\\", "/").rpartition("/")[2])
    return text_of(Path(run.path).resolve().name)


def _elapsed_s(run: RunFiles) -> float | None:
    """The sum over processes from their start to their last record, without the pauses between them."""
    total, began, latest = 0.0, None, 0.0
    for record in run.events:
        now = finite(record, "time")
        if now is None:
            continue
        if record["event"] == "start":
            total += latest - began if began is not None else 0.0
            began = now
        latest = now
    return None if began is None else total + latest - began
