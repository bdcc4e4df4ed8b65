"""The training loop: steps, evaluations, checkpoints, and the reasons to stop.

All decisions use values that a step has summed over ranks together with the gradients, so that all
ranks take the same branch.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.config import changed_settings
from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.events import EvalEvent, NoteEvent, StartEvent
from paceline.data import allowed_corrupt, create_eval_loader
from paceline.train.batch_sizes import eval_batch
from paceline.train.checkpoint import Checkpoint, write_atomically
from paceline.train.eval_details import EvalDetails, wants_details
from paceline.train.evaluate import evaluate
from paceline.train.machine import command_line, hardware, versions
from paceline.train.observers import InputReport
from paceline.train.step import StepOutcome
from paceline.train.step_records import StepRecords, check_divergence
from paceline.train.strategy import strategy_fields
from paceline.train.training import Training
from paceline.train.weights import applied


@dataclass(frozen=True)
class RunResult:
    """Says why a run ended.

    Attributes:
        stopped_by: `finished`, `target`, `callback` or the name of a signal.
        stop_signal: The signal, if one stopped the run.
    """

    stopped_by: str
    stop_signal: signal.Signals | None


class TrainingLoop:
    """Runs a `Training` from its current step to the end."""

    def __init__(self, training: Training) -> None:
        self._t = training
        self._before_s = training.progress.train_s
        self._started = time.perf_counter()
        if training.folder.holds_its_checkpoint:
            training.saved_step = training.progress.step
        share = training.config.data.max_corrupt_share
        self._input = InputReport(
            training.progress, training.plan.samples, share, training.group, training.emit
        )
        self._records = StepRecords(training)
        self.save_owed = False
        self._step_s: list[float] = []

    def start(self) -> None:
        """Records the start of the run. All ranks call this."""
        t, progress = self._t, self._t.progress
        t.startup.end("records")
        t.emit(
            StartEvent(
                step=progress.step,
                total_steps=t.plan.total_steps,
                steps_per_epoch=t.plan.steps_per_epoch,
                world_size=t.plan.world_size,
                global_batch_size=t.plan.global_batch,
                resumed_from=str(t.folder.resume_from) if t.folder.resume_from else None,
                chosen=t.chosen,
                versions=versions(),
                hardware=hardware(t.group.device),
                command=command_line(),
                changed=changed_settings(t.config),
                startup_s=dict(t.startup.seconds),
                counts={name: list(words) for name, words in t.step.strategy.counts.items()},
                shown=[
                    {"part": t.step.strategy.name, **asdict(own)} for own in t.step.strategy.shown
                ],
                processes=t.group.world_size,
            )
        )
        if t.callbacks is not None and t.callbacks.error is not None:
            # The first exchange reports the error to all ranks, and the first step changes nothing.
            t.step.fault = t.callbacks.error
        t.step.strategy.start(t)
        if t.folder.resume_from is not None and t.saved_step < 0:
            # Resumed from a checkpoint in a different folder: this folder needs a checkpoint, too.
            self._save(best=False)

    def run(self) -> RunResult:
        """Trains to the end of the run, or until a signal or callback stops it, and saves a checkpoint.

        After a `LostMemberError` and a call of `recover`, another call continues the training.

        Returns:
            The reason why training ended.

        Raises:
            PacelineError: If the run fails on any rank.
        """
        t, progress = self._t, self._t.progress
        try:
            result = self._catch_up() or self._steps()
        except PacelineError as error:
            self._save_before(error)
            raise
        finally:
            self._input.note(t.step.loader.note())
        progress.train_s = self._elapsed()
        self._records.gather_times()
        self.save()
        t.write_trace()
        self._note_not_finite()
        return result

    def save(self) -> None:
        """Saves a checkpoint of the last completed step, if there is none yet. All ranks call this."""
        if self._t.saved_step != self._t.progress.step:
            self._save(best=False)
        self._t.finish_save()

    def forget_times(self) -> None:
        """Drops step times that were not gathered yet, because a lost rank has some of them."""
        self._records.forget_times()

    def _note_not_finite(self) -> None:
        """Emits a note if the last training or validation loss is not finite."""
        progress = self._t.progress
        evaluated = progress.evaluated_step == progress.step and progress.val_loss is not None
        if not progress.loss_finite or (evaluated and not math.isfinite(progress.val_loss or 0.0)):
            text = "the run ended with a loss that is not finite: lower --lr or lengthen --warmup-epochs"
            self._t.emit(NoteEvent(text))

    def _save_before(self, error: PacelineError) -> None:
        """Saves a checkpoint of the last completed step after an error of the user's model or data.

        All ranks save, because the failed step has reported the error to all of them.
        """
        t = self._t
        fresh = t.saved_step != t.progress.step and t.progress.step > 0
        exact = t.step.faulted and t.step.strategy.same_weights
        if exact and fresh and self._is_sound and "out of memory" not in str(error):
            self._save(best=False)
            t.finish_save()

    def _steps(self) -> RunResult:
        t, progress = self._t, self._t.progress
        number = progress.step - 1
        while (number := number + 1) < t.plan.total_steps:
            t.step.launch(number, t.schedule.rate(number), t.schedule.others(number))
            pause = self._evaluation_is_due(number + 1) or self._save_is_due(number + 1)
            stop = self.collect(0 if pause else t.step.lag)
            if stop is None and self.save_owed and not pause:
                # A save is due. Steps in flight complete first.
                stop, pause = self.collect(), True
            if stop is not None:
                return stop
            if t.trace.is_due(progress.step):
                t.write_trace()
            if not pause:
                continue
            self._records.gather_times()
            result = self._evaluate() if self._evaluation_is_due(number + 1) else None
            if result is not None:
                return result
            if self._save_is_due(number + 1):
                self._save_if_sound()
        return self.collect() or RunResult("finished", None)

    def collect(self, left: int = 0) -> RunResult | None:
        """Reads the outcomes of launched steps until only `left` of them still run on the device.

        If a step requests a stop, reads the outcomes of all steps.
        """
        stop: signal.Signals | None = None
        requested = False
        while self._t.step.under_way > left:
            outcome = self._t.step.collect()
            if outcome.done:
                self._account(outcome)
            if outcome.stop is not None:
                stop, left = outcome.stop, 0
            if outcome.requested:
                requested, left = True, 0
        if stop is not None:
            return RunResult(stop.name, stop)
        return RunResult("callback", None) if requested else None

    def _catch_up(self) -> RunResult | None:
        """Runs what is due after a resume or a loss, and ends a run that has reached its target."""
        progress = self._t.progress
        if self._evaluation_is_due(progress.step):
            return self._evaluate()
        if progress.step > 0 and self._t.saved_step != progress.step:
            # The loss of a rank has interrupted the save after this step.
            best = progress.best_step == progress.evaluated_step == progress.step
            if best and self._t.config.checkpoint.keep_best:
                self._save(best=True)
            elif self._save_is_due(progress.step):
                self._save_if_sound()
        if progress.evaluated_step != progress.step or not self._reached():
            return None
        if progress.time_to_target_s is None:
            progress.time_to_target_s = progress.train_s
        return RunResult("target", None)

    def _reached(self) -> bool:
        target, top1 = self._t.config.run.target_top1, self._t.progress.top1
        return target is not None and top1 is not None and top1 >= target

    def _elapsed(self) -> float:
        return self._before_s + time.perf_counter() - self._started

    def _account(self, outcome: StepOutcome) -> None:
        self.save_owed |= outcome.save
        if self._t.budget is not None:
            self._step_s.append(outcome.step_s)
        self._records.add(outcome, self._elapsed())
        self._input.training(outcome.corrupt_here, outcome.corrupt_count)
        if outcome.skipped:
            check_divergence(self._t, outcome)

    def _evaluation_is_due(self, step: int) -> bool:
        t = self._t
        if step == 0 or t.progress.evaluated_step == step:
            return False
        if step == t.plan.total_steps:
            return True
        if t.budget is not None and self._ends_first_epoch(step):
            return True
        return t.plan.ends_epoch(step - 1, t.config.run.eval_interval_epochs)

    def _ends_first_epoch(self, step: int) -> bool:
        plan = self._t.plan
        return plan.position(step - 1) < plan.samples and plan.ends_epoch(step - 1)

    def _keep_to_budget(self, eval_s: float) -> None:
        """Corrects the number of epochs once, after the first epoch. A collective."""
        t, budget = self._t, self._t.budget
        if budget is None:
            return
        t.budget = None
        if t.step.faulted or not self._ends_first_epoch(t.progress.step):
            return
        spent_s = self._elapsed() + sum(t.startup.seconds.values())
        epochs = budget.epochs(spent_s, self._step_s, eval_s, t.plan, t.config.run)
        agreed = int(t.group.broadcast_bytes(str(epochs).encode()).decode())
        if agreed != t.config.run.epochs:
            t.change_epochs(agreed)

    def _evaluate(self) -> RunResult | None:
        """Evaluates the model, and saves if a save is due or the accuracy is the best of the run.

        Returns a `RunResult` if the run ends after this evaluation, else None.
        """
        t, progress = self._t, self._t.progress
        t.step.strategy.pause()
        loader = create_eval_loader(
            t.validation, t.config.data, rank=t.group.rank, world_size=t.group.world_size,
            batch_size=eval_batch(t.sizes.micro_batch), device=t.group.device,
        )  # fmt: skip
        limit = allowed_corrupt(t.config.data.max_corrupt_share, len(t.validation))
        classes = t.config.model.num_classes or len(t.source.classes)
        details = None
        if wants_details(t.config, len(t.validation), classes):
            details = EvalDetails(classes, t.group.device)
        with applied(t.state.average), t.step.batch_norm.averaged(t.group), loader:
            result = evaluate(
                t.model, loader, t.step.normalize.without_padding(), t.step.policy, t.group, t.stop,
                corrupt_limit=limit, classes=classes, loss_function=t.step.micro.loss_function,
                details=details, flip=t.config.data.eval_flip,
            )  # fmt: skip
        if note := loader.note():
            self._input.note(f"evaluation: {note}")
        if isinstance(result, signal.Signals):
            return RunResult(result.name, result)
        progress.train_s = self._elapsed()
        progress.evaluated_step = progress.step
        progress.top1, progress.top5, progress.val_loss = result.top1, result.top5, result.loss
        # Diverged weights can score well by chance. They must not replace the best checkpoint.
        best = result.top1 > progress.best_top1 and math.isfinite(result.loss) and self._may_be_best
        if best:
            progress.best_top1, progress.best_step = result.top1, progress.step
        self._input.evaluation(result.corrupt_here, result.corrupt_count)
        if details is not None:
            self._write_details(details)
        reached, strategy = self._reached(), t.step.strategy
        fields = strategy.record_evaluation(reached_target=reached)
        t.emit(
            EvalEvent(
                step=progress.step,
                epoch=t.plan.epoch_at(progress.step),
                top1=result.top1,
                top5=result.top5,
                loss=result.loss,
                samples=result.samples,
                eval_s=result.eval_s,
                fields=strategy_fields(strategy, "record_evaluation", fields, EvalEvent.names()),
                remark=strategy.remark(),
            )
        )
        if reached and progress.time_to_target_s is None:
            progress.time_to_target_s = progress.train_s
        # Before the save, so that the checkpoint contains the correction.
        self._keep_to_budget(result.eval_s)
        if reached or (best and t.config.checkpoint.keep_best):
            self._save(best=best)
        elif self._save_is_due(progress.step):
            self._save_if_sound()
        return RunResult("target", None) if reached else None

    def _write_details(self, details: EvalDetails) -> None:
        """Writes `evaluation.json` on rank 0. All ranks call this.

        If writing fails, training continues without the file.
        """
        t = self._t
        content = details.gather(t.group, t.progress.step, list(t.source.classes))
        if content is None:
            return
        try:
            t.check_folder()
            write_atomically(t.folder.path / "evaluation.json", content)
        except PacelineError as error:
            self._input.note(str(error))

    def _save_is_due(self, step: int) -> bool:
        t = self._t
        if t.saved_step == step:
            return False
        if self.save_owed or step == t.plan.total_steps:
            return True
        intervals = t.config.checkpoint
        if intervals.interval_steps and step % intervals.interval_steps == 0:
            return True
        every = intervals.interval_epochs
        return every > 0 and t.plan.ends_epoch(step - 1, every)

    @property
    def _is_sound(self) -> bool:
        """Returns False if the last step was skipped, because faulty weights may be the cause."""
        return self._t.progress.skipped_in_a_row == 0

    @property
    def _may_be_best(self) -> bool:
        """Returns False after several skipped steps in a row or a non-finite loss.

        A single skipped step is normal: a dynamic loss scale skips a step whenever it has grown too
        large.
        """
        return self._t.progress.skipped_in_a_row <= 1 and self._t.progress.loss_finite

    def _save_if_sound(self) -> None:
        """Saves a checkpoint. If the last step was skipped, waits with the save until a step succeeds.

        The last checkpoint thus never contains weights that may be faulty.
        """
        self.save_owed = not self._is_sound
        if self._is_sound:
            self._save(best=False)

    def _replan(self) -> None:
        t = self._t
        # After a fault the run ends, and `replace_plan` would raise the fault again.
        if t.progress.step >= t.plan.total_steps or t.step.faulted:
            return
        plan = t.step.strategy.replan(t.plan)
        if plan is not t.plan:
            t.replace_plan(plan)
            shares = ":".join(map(str, plan.shares))
            t.emit(NoteEvent(f"samples of each rank from step {t.progress.step} on: {shares}"))

    def _save(self, *, best: bool) -> None:
        """Saves a checkpoint on rank 0. All ranks call this.

        If writing fails, the run ends at the next step.
        """
        t, progress = self._t, self._t.progress
        started = time.perf_counter()
        t.step.strategy.pause()
        # Before the capture, because the checkpoint contains the plan of the following steps.
        self._replan()
        # `before_content` runs after the collectives, so that only rank 0 waits for the previous file.
        checkpoint = t.state.capture(progress, before_content=t.finish_save)
        t.saved_step = progress.step
        # One save serves all requests so far: a signal reaches ranks at slightly different times.
        self.save_owed = t.stop.save_requested = False
        if checkpoint is None:
            return
        best = best and t.config.checkpoint.keep_best
        forget = self._is_sound

        def write(checkpoint: Checkpoint) -> Path:
            t.check_folder()
            try:
                return t.store.put(checkpoint, best=best, forget=forget)
            except CheckpointError:
                t.check_folder()  # if the folder was deleted, its error explains the failure better
                raise

        t.writer.save(checkpoint, write, best=best, started=started)
        t.finish_save(wait=False)
