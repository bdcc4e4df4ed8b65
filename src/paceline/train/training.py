"""`Training`: everything the loop needs, and what it does between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from paceline.comm.agreement import PeerError
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import PacelineError
from paceline.core.events import CheckpointEvent, Event, NoteEvent, Observer
from paceline.data import BatchPlan, Source, TrainBatches
from paceline.optim.schedule import LrSchedule
from paceline.plan.plan_file import PlanFile
from paceline.plan.rehearsal import ClusterClock
from paceline.train.callbacks import CallbackRunner
from paceline.train.checkpoint import CheckpointStore
from paceline.train.checkpoint_writer import CheckpointWriter
from paceline.train.inputs import BatchSizes
from paceline.train.observers import RunTrace
from paceline.train.run_folder import RunFolder, RunLock
from paceline.train.run_state import Progress, RunState
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals


@dataclass(kw_only=True)
class Training:
    """Everything the loop needs. `chosen` lists automatic choices for display and record;
    `saved_step` is the step of the newest checkpoint in the folder, equal on all ranks, or -1."""

    config: RunConfig
    group: Group
    folder: RunFolder
    lock: RunLock | None
    sizes: BatchSizes
    plan: BatchPlan
    schedule: LrSchedule
    model: nn.Module
    state: RunState
    step: TrainStep
    source: Source
    validation: Source
    store: CheckpointStore
    writer: CheckpointWriter
    progress: Progress
    stop: StopSignals
    plan_file: PlanFile
    trace: RunTrace
    make_loader: Callable[[BatchPlan, int], TrainBatches]
    # Of a rehearsal, where the planner knows the cluster's times.
    clock: ClusterClock | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    observers: list[Observer] = field(default_factory=list)
    callbacks: CallbackRunner | None = None
    # For a module that the user gave: the state that is evaluated and exported, once the run has ended.
    keeps_final_state: bool = False
    final_state: dict[str, torch.Tensor] | None = None
    saved_step: int = -1

    @property
    def is_main(self) -> bool:
        return self.group.rank == 0

    def emit(self, event: Event) -> None:
        """Passes an event to all observers; a write error fails the run at the next step."""
        for observer in self.observers:
            try:
                observer.on_event(event)
            except OSError as error:
                self.step.fault = PacelineError(
                    f"cannot write the run's records in {self.folder.path}: {error.strerror}",
                    "free space or choose another --output, then --resume auto",
                )

    def divide_again(self, plan: BatchPlan) -> None:
        """Goes on with other shares of the global batch. Between steps, on all ranks."""
        # They have the size of this rank's micro-batches until now.
        self.step.drop_graphs()
        self.step.loader.close()
        self.step.loader = self.group.agree_on(
            "loader", lambda: self.make_loader(plan, self.progress.step)
        )
        self.plan = self.step.plan = plan
        self.state = replace(self.state, batches=plan)

    def check_folder(self) -> None:
        """Before rank 0 writes: raises if the folder is gone or another process has taken it over."""
        if self.lock is not None:
            self.lock.check()

    def finish_save(self, *, wait: bool = True) -> None:
        """Reports a checkpoint that has been written since the last call; with `wait`, also the one that
        is being written. A write error fails the run at the next step."""
        error = self._report_save(wait=wait)
        if error is not None:
            self.step.fault = error

    def finish_last_save(self) -> None:
        """Of a run that fails: a save that fails too is a note, since no step follows that would report
        it."""
        error = self._report_save(wait=True)
        if error is not None:
            self.emit(NoteEvent(str(error)))

    def _report_save(self, *, wait: bool) -> PacelineError | None:
        written = self.writer.take_written(wait=wait)
        if written is None:
            return None
        if written.note:
            self.emit(NoteEvent(written.note))
        if written.error is None:
            self.emit(
                CheckpointEvent(
                    written.step, str(written.path), written.save_s, written.best, written.stall_s
                )
            )
        return written.error

    def write_trace(self) -> None:
        """All ranks send their spans, and rank 0 writes them. A write error fails the run at the next
        step."""
        try:
            note = self.trace.write()
        except PeerError:
            raise  # the error of another rank, which has published it
        except PacelineError as error:
            self.step.fault = error
            return
        if note:
            self.emit(NoteEvent(note))

    def close(self) -> None:
        # CUDA graphs hold references to NCCL communicators, so they go before the process groups.
        self.step.release()
        if not self.group.aborted:
            self.step.exchange.close()
        self.step.loader.close()
        self.source.close()
        self.validation.close()
        for observer in self.observers:
            # A full disk was already reported when the record was written.
            with contextlib.suppress(OSError):
                observer.close()
        if self.lock is not None:
            self.lock.release()
