"""What the outcome of a step becomes: the run's progress, and the events of its record."""

from __future__ import annotations

import math

import torch

from paceline.core.events import NoteEvent, StepEvent, TrustEvent
from paceline.core.host import HostLoad
from paceline.plan.noise import NoiseEstimate, NoiseScale
from paceline.train.rank_records import RankTimes, RecentEvents, each_rank_writes
from paceline.train.step import StepOutcome
from paceline.train.training import Training


class StepRecords:
    """Accounts for completed steps, one after the other."""

    def __init__(self, training: Training) -> None:
        self._t = training
        group, settings = training.group, training.config.run
        self._rank_times: RankTimes | None = None
        if group.world_size > 1 and not each_rank_writes(settings, group.world_size):
            self._rank_times = RankTimes(group, training.emit)
        # Of many ranks, the first of a host notes that it is overloaded.
        notes = self._rank_times is None or group.rank == group.host_leader
        self._load, self._overload_noted = HostLoad(), not notes
        self._noise = NoiseScale(*training.progress.noise)

    def add(self, outcome: StepOutcome, train_s: float) -> None:
        """A completed step, `train_s` after the start of the run."""
        t, progress, number = self._t, self._t.progress, outcome.number
        first, last = t.plan.step_range(number)
        progress.step = number + 1
        progress.images += last - first
        progress.step_s += outcome.step_s
        progress.train_s = train_s
        progress.skipped_steps += outcome.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        progress.loss_finite = math.isfinite(outcome.loss)
        t.finish_save(wait=False)
        if t.clock is not None:
            progress.predicted_s += t.clock.step_s
        self._note_fallback()
        estimate = self._noise_estimate(outcome, last - first)
        event = StepEvent(
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
            grad_norm=outcome.grad_norm if t.config.optim.clip_norm else None,
            grad_signal=None if estimate is None else estimate.signal,
            grad_variance=None if estimate is None else estimate.variance,
            noise_scale=None if estimate is None else self._noise.value,
            batch_size=last - first if t.plan.growth else None,
            momentum=t.schedule.others(number).get("momentum"),
            staleness=outcome.staleness,
            predicted_s=progress.predicted_s if t.clock else None,
        )
        t.emit(event)
        if self._rank_times is not None:
            self._rank_times.note(event)
        if outcome.save:
            self._write_recent_events()
        if t.is_main and self.trust_is_due(progress.step):
            ratios = t.step.update.optimizer.trust_ratios()
            names = t.step.update.names
            t.emit(TrustEvent(progress.step, dict(zip(names, ratios, strict=True))))

    def gather_times(self) -> None:
        """In a pause, when no step is in flight: a collective between steps would cost time."""
        if self._rank_times is not None:
            self._rank_times.gather()

    def trust_is_due(self, step: int) -> bool:
        """Reading the ratios synchronizes with the device, so it happens at intervals only."""
        interval = self._t.config.optim.trust_log_interval
        return interval > 0 and step % interval == 0

    def _noise_estimate(self, outcome: StepOutcome, samples: int) -> NoiseEstimate | None:
        """The estimate of one step, added to the running averages; None where there is none."""
        if not self._t.config.run.noise_scale or outcome.skipped:
            return None
        micro_batches = -(-samples // self._t.plan.micro_batch)
        estimate = NoiseEstimate.of(
            outcome.whole_squared, outcome.parts_squared, samples, micro_batches
        )
        if estimate is not None:
            self._noise.add(estimate)
            self._t.progress.noise = [
                self._noise.signal, self._noise.variance, self._noise.weight,
            ]  # fmt: skip
        return estimate

    def _note_fallback(self) -> None:
        """Once: micro-steps are not captured although they were meant to be."""
        reason, chosen = self._t.step.micro.uncaptured, self._t.chosen
        if reason and "not captured" not in chosen["speed"]:
            chosen["speed"] += f"; not captured: {reason}"
            self._t.emit(NoteEvent(f"steps are not captured from here on: {reason}"))

    def _write_recent_events(self) -> None:
        """A signal to save asks for the details of all ranks too."""
        for observer in self._t.observers:
            if isinstance(observer, RecentEvents):
                observer.write()

    def _core_wait_share(self) -> float | None:
        """The latest reading; the first one of an overloaded host also emits a note."""
        if (reading := self._load.read()) is not None:
            text = reading.describe(torch.get_num_threads())
            if text and not self._overload_noted:
                self._overload_noted = True
                self._t.emit(NoteEvent(text))
        return self._load.latest.waited if self._load.latest else None
