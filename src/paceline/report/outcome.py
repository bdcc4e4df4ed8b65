"""`Outcome`: the results of a finished or unfinished run. `Efficiency`: the throughput T = S · N · e.

The results come from the summary if there is one, otherwise from the records. T is the number of
images per second over the whole training, without those of skipped steps. S is the throughput of
one rank while it computes, N is the number of ranks, and e is the efficiency. All time without
compute is attributed to causes such as communication or input. So e and the fractions of time lost
to each cause sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from paceline.core.units import (
    count,
    format_duration,
    format_percent,
    number,
    plural,
    rate,
    text_of,
)
from paceline.report.bottleneck import ExposedWaits, first_after_start
from paceline.report.records import finite, integer, known, middle
from paceline.report.run_files import RunFiles, computed_once, finite_values

# Reasons to leave the training loop that mean success.
_DONE = frozenset({"finished", "target"})
# Formats of extension figures, by unit.
_UNITS = {"duration": format_duration, "rate": rate}
_MAX_FIGURES = 20


@dataclass(frozen=True)
class ExtraFigure:
    """A result that an extension adds, such as a predicted time (`core.events.ShownField`).

    The value comes from the extension's part of the summary or, before the end, from the evaluations.
    """

    name: str
    label: str
    unit: str
    column: str
    axis: str
    value: float | None

    @classmethod
    def of(cls, run: RunFiles) -> tuple[ExtraFigure, ...]:
        """Returns all valid results of extensions that a run declares."""
        declared, figures = run.start.get("shown"), []
        for entry in declared[:_MAX_FIGURES] if isinstance(declared, list) else ():
            if isinstance(entry, dict):
                name, label, unit, column, axis, part = (
                    text_of(entry.get(key, ""))
                    for key in ("name", "label", "unit", "column", "axis", "part")
                )
                summary = (run.summary or {}).get(part)
                value = finite(summary, name) if isinstance(summary, dict) else None
                if run.summary is None:
                    value = max(finite_values(run.of_kind("eval"), name), default=None)
                figures.append(cls(name, label, unit, column, axis, value))
        return tuple(figures)

    @property
    def text(self) -> str:
        return "" if self.value is None else _UNITS.get(self.unit, number)(self.value)


@dataclass(frozen=True)
class Outcome:
    """The results of a run; unknown values are None. `state` is finished, stopped or unfinished."""

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
    # The largest batch of any step so far, if a schedule changes it.
    grown_batch: int | None
    corrupt_samples: int
    corrupt_val_samples: int
    skipped_steps: int
    steps_without_loss: int
    resumes: int
    read_retries: int
    damaged_cache_entries: int
    noise_scale: float | None
    state_bytes_per_parameter: float | None
    exchange_state_bytes_per_parameter: float | None
    exchange_bytes_per_step: float | None
    # Smaller than `world_size` if each process computes several ranks.
    processes: int | None
    figures: tuple[ExtraFigure, ...]

    @property
    def is_virtual(self) -> bool:
        """True if each process computes the work of several ranks."""
        return bool(self.processes) and (self.processes or 0) < (self.world_size or 0)

    @property
    def largest_batch(self) -> int | None:
        return self.grown_batch or self.global_batch_size

    @classmethod
    @computed_once
    def of(cls, run: RunFiles) -> Outcome:
        """Computes the results of a run."""
        summary, start, steps = run.summary or {}, run.start, run.steps()
        top1, top5 = run.eval_curve("top1").value, run.eval_curve("top5").value
        noise, batches = steps.known("noise_scale"), steps.known("batch_size")
        stopped_by = _stopped_by(run)
        counters = summary.get("input_counters")
        counters = counters if isinstance(counters, dict) else {}
        last = max(run.of_kind("eval"), key=lambda r: int(r["step"]), default={})
        if len(steps) and int(steps.number[-1]) >= last.get("step", 0):
            last = {"step": int(steps.number[-1]), "epoch": steps.last("epoch")}

        def first(name: str, fallback: float | None) -> float | None:
            value = finite(summary, name)
            return fallback if value is None else value

        return cls(
            name=_name(run),
            state=_state(run, stopped_by),
            stopped_by=stopped_by,
            top1=first("top1", float(top1[-1]) if len(top1) else None),
            top5=first("top5", float(top5[-1]) if len(top5) else None),
            best_top1=float(top1.max()) if len(top1) else None,
            images_per_s=first("images_per_s", middle(steps["images_per_s"])),
            train_s=first("train_s", run.ranks[0].elapsed_s()),
            time_to_target_s=finite(summary, "time_to_target_s"),
            epochs=first("epochs", finite(last, "epoch")),
            steps=integer(summary, "steps") or int(last.get("step", 0)),
            total_steps=integer(start, "total_steps"),
            world_size=integer(summary, "world_size") or integer(start, "world_size"),
            global_batch_size=integer(summary, "global_batch_size")
            or integer(start, "global_batch_size"),
            grown_batch=int(batches.max()) if len(batches) else None,
            corrupt_samples=_corrupt_count(run, "corrupt_samples", "train"),
            corrupt_val_samples=_corrupt_count(run, "corrupt_val_samples", "val"),
            skipped_steps=int(steps.skipped.sum()),
            steps_without_loss=len(steps) - len(steps.known("loss")),
            resumes=len(run.resumes),
            read_retries=integer(counters, "read_retries") or 0,
            damaged_cache_entries=integer(counters, "cache_damaged") or 0,
            noise_scale=first("noise_scale", float(noise[-1]) if len(noise) else None),
            state_bytes_per_parameter=finite(summary, "state_bytes_per_parameter"),
            exchange_state_bytes_per_parameter=finite(
                summary, "exchange_state_bytes_per_parameter"
            ),
            exchange_bytes_per_step=finite(summary, "exchange_bytes_per_step"),
            processes=integer(start, "processes"),
            figures=ExtraFigure.of(run),
        )


def verdict(run: RunFiles) -> str:
    """Summarizes a run in one line.

    Returns:
        A text such as `quickstart: 90.3 % top-1 in 101 s, 1,430 images/s on 1 rank`. For a run that has
        not finished, the text tells the progress.
    """
    outcome = Outcome.of(run)
    result = _result(outcome)
    if outcome.state == "finished":
        target = "target reached, " if outcome.stopped_by == "target" else ""
        bad = "; its last loss is not finite" if _ends_without_loss(run) else ""
        return f"{outcome.name}: {target}{result or 'finished without an evaluation'}{bad}"
    position = f"at step {count(outcome.steps)}"
    if outcome.total_steps:
        share = 100 * outcome.steps / outcome.total_steps
        position += f" of {count(outcome.total_steps)} ({format_percent(share, 0)})"
    if outcome.state == "stopped":
        state = f"stopped by {outcome.stopped_by} {position}"
    elif outcome.steps:
        state = f"unfinished, {position}"
    else:
        state = "unfinished, no step recorded yet"
    return f"{outcome.name}: {state}" + (f"; so far {result}" if result else "")


def _ends_without_loss(run: RunFiles) -> bool:
    """Returns True if the loss of the last step or of the last evaluation is not finite."""
    if len(run.steps()) and run.steps().last("loss") is None:
        return True
    last = max(run.of_kind("eval"), key=lambda record: int(record["step"]), default=None)
    return last is not None and "loss" in last and finite(last, "loss") is None


def _result(outcome: Outcome) -> str:
    """Lists accuracy, time, speed and number of ranks, as far as they are known."""
    accuracy = "" if outcome.top1 is None else f"{format_percent(outcome.top1, 1)} top-1"
    timed = outcome.train_s is not None and outcome.steps
    parts = [
        " in ".join(filter(None, (accuracy, format_duration(outcome.train_s) if timed else "")))
    ]
    if outcome.is_virtual:
        parts.append(f"{count(outcome.world_size)} virtual ranks")
        parts += [f"{figure.label} {figure.text}" for figure in outcome.figures
                  if figure.axis and figure.text]  # fmt: skip
    elif outcome.images_per_s is not None:
        ranks = f" on {plural(outcome.world_size, 'rank')}" if outcome.world_size else ""
        parts.append(f"{rate(outcome.images_per_s)} images/s{ranks}")
    return ", ".join(filter(None, parts))


def _corrupt_count(run: RunFiles, field: str, split: str) -> int:
    """Returns how many samples of a split are corrupt.

    Uses the count in the summary or, without one, the number of distinct names in the records.
    """
    exact = integer(run.summary or {}, field)
    if exact is not None:
        return exact
    return len(
        {
            text_of(record.get("name"))
            for rank in run.ranks
            for record in run.of_kind("corrupt", rank)
            if record.get("split", "train") == split
        }
    )


def _stopped_by(run: RunFiles) -> str | None:
    """Returns what ended the training loop, or None if it has not ended or the process was killed."""
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
    """Returns the recipe's name (of a file, without the extension) or else the run folder's name."""
    settings = run.config.get("run")
    configured = settings.get("name") if isinstance(settings, dict) else None
    for recipe in ((run.summary or {}).get("recipe"), configured):
        if isinstance(recipe, str) and recipe.strip():
            return text_of(recipe.removesuffix(".toml").replace("\\", "/").rpartition("/")[2])
    return text_of(Path(run.path).resolve().name)


# The causes of lost time, in the order of the bar.
COMMUNICATION, INPUT, STRAGGLER = "exposed communication", "input", "waiting for the slowest rank"
SKIPPED, EVALUATION, SAVING, OTHER = "skipped steps", "evaluation", "saving", "start-up and other"
CAUSES = (COMMUNICATION, INPUT, STRAGGLER, SKIPPED, EVALUATION, SAVING, OTHER)
# A smaller share is not mentioned.
_NOTABLE = 0.005


@dataclass(frozen=True)
class Efficiency:
    """The factors of T = S · N · e.

    Attributes:
        total: T, the images per second of all ranks over the whole training.
        alone: S, the images per second of one rank while it computes.
        ranks: N, the number of ranks.
        lost: The fraction of the training time lost to each of `CAUSES`.
    """

    total: float
    alone: float
    ranks: int
    lost: dict[str, float]

    @property
    def e(self) -> float:
        """The scaling efficiency; time for evaluations and checkpoints counts as lost."""
        return max(0.0, 1.0 - sum(self.lost.values()))

    @classmethod
    @computed_once
    def of(cls, run: RunFiles) -> Efficiency | None:
        """Computes the factors from a run; returns None without timed steps or with virtual ranks."""
        steps = run.steps()
        timed = steps.or_zero("step_s") > 0
        lengths, first = steps["step_s"][timed], first_after_start(run)[timed]
        images = steps.or_zero("images_per_s")[timed] * lengths
        all_images = float(images.sum())
        outcome = Outcome.of(run)
        if all_images <= 0 or outcome.is_virtual:
            return None
        ranks = outcome.world_size or 1
        # The time by which the first steps after a start are longer than a typical step.
        startup_s = float(np.maximum(lengths[first] - np.median(lengths), 0.0).sum())
        steps_s = float(lengths.sum())
        stepping_s = steps_s - startup_s
        shares = _shares_of_a_step(run, ranks)
        # The time of skipped steps is not divided further.
        skipped_share = float(images[steps.skipped[timed]].sum()) / all_images
        seconds = {cause: share * stepping_s for cause, share in shares.items()}
        computing_s = max(stepping_s - sum(seconds.values()), 1e-9)
        seconds[SKIPPED] = skipped_share * computing_s
        seconds[EVALUATION] = sum(finite_values(run.of_kind("eval"), "eval_s"))
        seconds[SAVING] = sum(finite_values(run.of_kind("checkpoint"), "stall_s"))
        known_s = steps_s + seconds[EVALUATION] + seconds[SAVING]
        whole_s = max(known_s, outcome.train_s or 0.0)
        seconds[OTHER] = whole_s - known_s + startup_s
        lost = {cause: max(0.0, seconds.get(cause, 0.0)) / whole_s for cause in CAUSES}
        alone = all_images / computing_s / ranks
        return cls((1 - skipped_share) * all_images / whole_s, alone, ranks, lost)

    @property
    def largest_loss(self) -> str:
        """The cause that lost the most time; empty if it lost less than 0.5 % of the training time."""
        cause = max(self.lost, key=lambda cause: self.lost[cause])
        return cause if self.lost[cause] >= _NOTABLE else ""

    def describe(self) -> str:
        """Returns `1,400 = 800 · 2 · 0.875 images/s; lost to: input 10 %, saving 2 %`."""
        formula = f"{rate(self.total)} = {rate(self.alone)} · {self.ranks} · {self.e:.3f} images/s"
        lost = sorted(self.lost.items(), key=lambda item: -item[1])
        named = ", ".join(
            f"{cause} {format_percent(100 * share, 0)}"
            for cause, share in lost
            if share >= _NOTABLE
        )
        return f"{formula}; lost to: {named}" if named else formula


def _shares_of_a_step(run: RunFiles, ranks: int) -> dict[str, float]:
    """Returns the fraction of a step that a rank waits on average, by cause.

    The causes are communication, the slowest rank, and the input. The first step after each start
    is left out.
    """
    waits, steps = ExposedWaits.of(run), run.steps()
    shares = {COMMUNICATION: 0.0, STRAGGLER: 0.0, INPUT: _input_share(run)}
    usable = (steps.or_zero("step_s") > 0) & ~first_after_start(run)
    _, waited, stepped = np.intersect1d(
        waits.step, steps.number[usable], assume_unique=True, return_indices=True
    )
    if total := float(steps["step_s"][usable][stepped].sum()):
        # The last rank waits only for the exchange. All other ranks also wait for the last rank.
        late = np.maximum(waits.other_ranks_s - waits.least_s, 0.0)[waited]
        late_s = float(late[waits.complete[waited]].sum())
        shares[COMMUNICATION] = float(waits.least_s[waited].sum()) / total
        shares[STRAGGLER] = late_s * (ranks - 1) / ranks / total
    # The sum may exceed a step because the shares are measured on different ranks.
    scale = max(1.0, sum(shares.values()) / 0.98)
    return {cause: share / scale for cause, share in shares.items()}


def _input_share(run: RunFiles) -> float:
    """Returns the fraction of the step time in which ranks wait for a batch, averaged over ranks."""
    of_all = [
        (finite(record["input_stall_s"], "median"), finite(record["step_s"], "median"))
        for record in run.of_kind("ranks")
        if isinstance(record.get("input_stall_s"), dict) and isinstance(record.get("step_s"), dict)
    ]
    measured = [(stall, length) for stall, length in of_all if stall is not None and length]
    if measured:
        return sum(stall for stall, _ in measured) / sum(length for _, length in measured)
    shares = []
    for rank in run.ranks:
        steps, later = run.steps(rank), ~first_after_start(run, rank)
        total = float(known(steps["step_s"][later]).sum())
        if total > 0:
            shares.append(float(known(steps["input_stall_s"][later]).sum()) / total)
    return fmean(shares) if shares else 0.0
