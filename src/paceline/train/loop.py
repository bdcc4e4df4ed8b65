"""The training loop: steps, evaluations, checkpoints, and the reasons to stop.

In: a `Training`. Out: a `RunResult`, equal on all ranks. Decisions are made from numbers that the
step's own exchange made equal everywhere, so no rank is ever alone in its branch.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.core.errors import PacelineError
from paceline.core.events import (
    CheckpointEvent,
    CorruptEvent,
    EvalEvent,
    Event,
    NoteEvent,
    StartEvent,
    StepEvent,
    StopEvent,
    TrustEvent,
)
from paceline.core.host_load import HostLoad
from paceline.data.corrupt import CorruptSample, allowed_corrupt
from paceline.data.create_loader import create_eval_loader
from paceline.train.divergence import check_divergence
from paceline.train.evaluate import evaluate
from paceline.train.machine import hardware, versions
from paceline.train.run_state import CorruptTally
from paceline.train.step import StepOutcome
from paceline.train.training import Training
from paceline.train.weights import applied

# Evaluation keeps no activations for a backward pass, so its batches may be larger than training's.
_EVAL_BATCH, _EVAL_TIMES = 256, 4


@dataclass(frozen=True)
class RunResult:
    """`stopped_by`: finished, target, or the name of the signal."""

    stopped_by: str
    stop_signal: signal.Signals | None


class TrainingLoop:
    """Runs a `Training` from where it stands to its end."""

    def __init__(self, training: Training) -> None:
        self._t = training
        self._before_s = training.progress.train_s
        self._started = time.perf_counter()
        if training.folder.holds_its_checkpoint:
            training.saved_step = training.progress.step
        self._tally = CorruptTally(
            training.progress,
            training.plan.samples,
            training.config.data.max_corrupt_share,
            training.group,
        )
        self._notes = InputNotes(training.emit, training.is_main)
        self._save_owed = False
        self._load, self._overload_noted = HostLoad(), False

    def run(self) -> RunResult:
        """Ends with a checkpoint of the last step on disk, whatever the reason to stop."""
        t, progress = self._t, self._t.progress
        t.emit(
            StartEvent(
                step=progress.step,
                total_steps=t.plan.total_steps,
                steps_per_epoch=t.schedule.steps_per_epoch,
                world_size=t.group.world_size,
                global_batch_size=t.plan.global_batch,
                resumed_from=str(t.folder.resume_from) if t.folder.resume_from else None,
                chosen=t.chosen,
                versions=versions(),
                hardware=hardware(t.group.device),
            )
        )
        if t.folder.resume_from is not None and t.saved_step < 0:
            # Started from another folder's checkpoint: from here on this folder stands alone.
            self._save(best=False)
        try:
            result = self._catch_up() or self._steps()
        finally:  # also where an error ends it
            self._notes.remark(t.step.loader.remark())
        progress.train_s = self._elapsed()
        if t.saved_step != progress.step:
            self._save(best=False)
        t.write_trace()
        t.group.agree("end", t.step.fault)
        t.emit(StopEvent(step=progress.step, reason=result.stopped_by))
        return result

    def _steps(self) -> RunResult:
        t, progress = self._t, self._t.progress
        for number in range(progress.step, t.plan.total_steps):
            t.step.launch(number, t.schedule.rate(number))
            pause = self._evaluation_is_due(number + 1) or self._save_is_due(number + 1)
            stop = self._collect(0 if pause or self._trust_is_due(number + 1) else t.step.lag)
            if stop is None and self._save_owed and not pause:
                # Asked for by a signal; the steps that are under way come first.
                stop, pause = self._collect(0), True
            if stop is not None:
                return stop
            if t.trace.is_due(progress.step):
                t.write_trace()
            if not pause:
                continue
            result = self._evaluate() if self._evaluation_is_due(number + 1) else None
            if result is not None:
                return result
            if self._save_is_due(number + 1):
                self._save_if_sound()
        return self._collect(0) or RunResult("finished", None)

    def _collect(self, left: int) -> RunResult | None:
        """Accounts for steps until `left` are under way; for all of them once one says stop."""
        stop: signal.Signals | None = None
        while self._t.step.under_way > left:
            outcome = self._t.step.collect()
            if outcome.done:
                self._account(outcome)
            if outcome.stop is not None:
                stop, left = outcome.stop, 0
        return None if stop is None else RunResult(stop.name, stop)

    def account_for_launched_steps(self) -> None:
        """Collects what is under way, as far as it was launched whole."""
        self._collect(0)

    def _catch_up(self) -> RunResult | None:
        """An evaluation that was due when the checkpoint was made, but was not done, comes first.

        A run that had reached its target, but was killed before it could say so, ends here.
        """
        if self._evaluation_is_due(self._t.progress.step):
            return self._evaluate()
        if self._t.progress.evaluated_step != self._t.progress.step or not self._reached():
            return None
        if self._t.progress.time_to_target_s is None:
            self._t.progress.time_to_target_s = self._t.progress.train_s
        return RunResult("target", None)

    def _reached(self) -> bool:
        target, top1 = self._t.config.run.target_top1, self._t.progress.top1
        return target is not None and top1 is not None and top1 >= target

    def _elapsed(self) -> float:
        return self._before_s + time.perf_counter() - self._started

    def _account(self, outcome: StepOutcome) -> None:
        t, progress, number = self._t, self._t.progress, outcome.number
        first, last = t.plan.step_range(number)
        progress.step = number + 1
        progress.images += last - first
        progress.step_s += outcome.step_s
        progress.train_s = self._elapsed()
        progress.skipped_steps += outcome.skipped
        self._save_owed |= outcome.save
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        progress.loss_finite = math.isfinite(outcome.loss)
        t.emit(
            StepEvent(
                step=progress.step,
                epoch=t.plan.epoch_at(progress.step),
                loss=outcome.loss,
                lr=outcome.rate,
                images_per_s=(last - first) / outcome.step_s,
                step_s=outcome.step_s,
                data_s=outcome.data_s,
                skipped=outcome.skipped,
                loss_scale=outcome.loss_scale,
                exposed_comm_s=outcome.exposed_comm_s,
                input_stall_s=sum(outcome.stall.values()),
                input_stall_causes=outcome.stall,
                core_wait_share=self._core_wait_share(),
            )
        )
        if t.is_main and self._trust_is_due(progress.step):
            ratios = t.step.update.optimizer.trust_ratios()
            names = t.step.update.names
            t.emit(TrustEvent(progress.step, dict(zip(names, ratios, strict=True))))
        if outcome.corrupt_count:
            new = self._tally.add(outcome.corrupt_here)
            self._notes.corrupt(progress.step, new, "train")
            self._notes.elsewhere(outcome.corrupt_count - len(outcome.corrupt_here))
            self._tally.check()
        if outcome.skipped:
            check_divergence(t, outcome)

    def _core_wait_share(self) -> float | None:
        """The latest reading; the first one that shows an overloaded host is also a note."""
        if (reading := self._load.read()) is not None:
            text = reading.describe(torch.get_num_threads())
            if text and not self._overload_noted:
                self._overload_noted = True
                self._t.emit(NoteEvent(text))
        return self._load.latest.waited if self._load.latest else None

    def _trust_is_due(self, step: int) -> bool:
        """Reading the ratios waits for the device: only every so many steps, when asked for."""
        interval = self._t.config.optim.trust_log_interval
        return interval > 0 and step % interval == 0

    def _evaluation_is_due(self, step: int) -> bool:
        t = self._t
        if step == 0 or t.progress.evaluated_step == step:
            return False
        if step == t.plan.total_steps:
            return True
        return t.plan.ends_epoch(step - 1, t.config.run.eval_interval_epochs)

    def _evaluate(self) -> RunResult | None:
        """Evaluates, keeps the best, saves; a result means that the run ends here."""
        t, progress = self._t, self._t.progress
        loader = create_eval_loader(
            t.validation,
            t.config.data,
            rank=t.group.rank,
            world_size=t.group.world_size,
            batch_size=min(_EVAL_BATCH, _EVAL_TIMES * t.sizes.micro_batch),
            device=t.group.device,
        )
        limit = allowed_corrupt(t.config.data.max_corrupt_share, len(t.validation))
        with applied(t.state.average), t.step.batch_norm.averaged(t.group), loader:
            found = evaluate(
                t.model, loader, t.step.normalize, t.step.policy, t.group, t.stop, limit
            )
        self._notes.remark(loader.remark(), "evaluation: ")
        if isinstance(found, signal.Signals):
            return RunResult(found.name, found)
        progress.train_s = self._elapsed()
        progress.evaluated_step = progress.step
        progress.top1, progress.top5, progress.val_loss = found.top1, found.top5, found.loss
        progress.corrupt_val_samples = found.corrupt_count
        # Weights that blew up still score by chance, and must not take the best one's place.
        best = found.top1 > progress.best_top1 and math.isfinite(found.loss) and self._may_be_best
        if best:
            progress.best_top1, progress.best_step = found.top1, progress.step
        self._notes.corrupt(progress.step, found.corrupt_here, "val")
        self._notes.elsewhere(found.corrupt_count - len(found.corrupt_here))
        t.emit(
            EvalEvent(
                step=progress.step,
                epoch=t.plan.epoch_at(progress.step),
                top1=found.top1,
                top5=found.top5,
                loss=found.loss,
                samples=found.samples,
                eval_s=found.eval_s,
            )
        )
        reached = self._reached()
        if reached and progress.time_to_target_s is None:
            progress.time_to_target_s = progress.train_s
        if reached or (best and t.config.checkpoint.keep_best):
            self._save(best=best)
        elif self._save_is_due(progress.step):
            self._save_if_sound()
        return RunResult("target", None) if reached else None

    def _save_is_due(self, step: int) -> bool:
        t = self._t
        if t.saved_step == step:
            return False
        if self._save_owed or step == t.plan.total_steps:
            return True
        intervals = t.config.checkpoint
        if intervals.interval_steps and step % intervals.interval_steps == 0:
            return True
        every = intervals.interval_epochs
        return every > 0 and t.plan.ends_epoch(step - 1, every)

    @property
    def _is_sound(self) -> bool:
        """False in a row of skipped steps: the weights may be what makes the gradients infinite."""
        return self._t.progress.skipped_in_a_row == 0

    @property
    def _may_be_best(self) -> bool:
        """One isolated overflow does not count against the weights: a dynamic loss scale skips a step
        whenever it has grown too large. Several skips in a row do, and so does a loss that is not finite,
        which no loss scale causes."""
        return self._t.progress.skipped_in_a_row <= 1 and self._t.progress.loss_finite

    def _save_if_sound(self) -> None:
        """Puts a save off until a step succeeds, lest bad checkpoints push the last good one out."""
        self._save_owed = not self._is_sound
        if self._is_sound:
            self._save(best=False)

    def _save(self, *, best: bool) -> None:
        """All ranks give their statistics; rank 0 writes. A failure waits for the next exchange."""
        t, progress = self._t, self._t.progress
        started = time.perf_counter()
        checkpoint = t.state.capture(progress)
        t.saved_step = progress.step
        # Whatever was asked for until now is served: signals reach ranks a moment apart.
        self._save_owed = t.stop.save_requested = False
        if checkpoint is None:
            return
        try:
            t.check_folder()
            best = best and t.config.checkpoint.keep_best
            path = t.shelf.put(checkpoint, best=best, forget=self._is_sound)
        except PacelineError as error:
            t.step.fault = error
            return
        t.emit(CheckpointEvent(progress.step, str(path), time.perf_counter() - started, best))


# `InputNotes`: what a run tells about its input, each thing once.
#
# In: corrupt samples and loaders' remarks, as steps and evaluations meet them. Out: events.


class InputNotes:
    """`is_main`: this rank has the display."""

    def __init__(self, emit: Callable[[Event], None], is_main: bool) -> None:
        self._emit = emit
        self._is_main = is_main
        self._told: set[str] = set()
        self._named: set[str] = set()

    def corrupt(self, step: int, samples: Iterable[CorruptSample], split: str) -> None:
        for sample in samples:
            if sample.name not in self._named:
                self._named.add(sample.name)
                self._emit(CorruptEvent(step, sample.name, sample.reason, split))

    def elsewhere(self, count: int) -> None:
        """What other ranks met is named in their own records."""
        if count > 0 and self._is_main:
            self._emit(NoteEvent(f"{count} corrupt on other ranks; see metrics.rank*.jsonl"))

    def remark(self, text: str, where: str = "") -> None:
        """Every evaluation may remark the same."""
        if text and where + text not in self._told:
            self._told.add(where + text)
            self._emit(NoteEvent(where + text))
