"""`Training`, the parts of a run, and `describe_run`, the description of its automatic choices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError
from paceline.core.events import (
    CheckpointEvent,
    Event,
    JsonlWriter,
    LengthEvent,
    NoteEvent,
    Observer,
)
from paceline.core.host import StartUp
from paceline.data import BatchPlan, Source, TrainBatches
from paceline.models.registry import count_frozen
from paceline.models.settings import STEMS_OF_MODEL
from paceline.optim.batch_growth import describe_stages
from paceline.optim.schedules import LrSchedule
from paceline.plan.plan_file import PlanFile
from paceline.train.batch_sizes import BatchSizes
from paceline.train.callbacks import CallbackRunner
from paceline.train.checkpoint import Checkpoint, CheckpointStore
from paceline.train.checkpoint_writer import CheckpointWriter
from paceline.train.choices import TimeBudget
from paceline.train.components import Components
from paceline.train.exchange_plan import describe_idle
from paceline.train.inputs import RunInputs
from paceline.train.machine import launcher_name
from paceline.train.model_checks import given_name
from paceline.train.observers import RunTrace
from paceline.train.resolve import create_schedule, with_epochs
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, RunLock
from paceline.train.run_state import Progress, RunState, changes
from paceline.train.step import TrainStep
from paceline.train.step_parts import StepParts
from paceline.train.stop_signals import StopSignals


@dataclass(kw_only=True)
class Training:
    """The parts of a run, and what the run does between steps.

    Attributes:
        written: The settings that `config.toml` contains.
        chosen: Descriptions of the automatic choices by name, for display and for the record.
        keeps_final_state: True if the user's program gave the module. In that case `final_state` gets
            the evaluated state dict at the end of the run.
        saved_step: Step of the newest checkpoint in the folder, equal on all ranks, or -1.
        budget: The time for the whole run, until the number of epochs has been corrected.
        records_incomplete: True if an event could not be written to `metrics.jsonl`.
    """

    config: RunConfig
    written: RunConfig
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
    startup: StartUp
    chosen: dict[str, str] = field(default_factory=dict)
    observers: list[Observer] = field(default_factory=list)
    callbacks: CallbackRunner | None = None
    keeps_final_state: bool = False
    final_state: dict[str, torch.Tensor] | None = None
    saved_step: int = -1
    records_incomplete: bool = False
    budget: TimeBudget | None = None

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.group.rank == 0

    def emit(self, event: Event) -> None:
        """Passes an event to all observers. The first failure to write a log file becomes a note."""
        for observer in self.observers:
            try:
                observer.on_event(event)
            except OSError as error:
                if not self.records_incomplete:
                    self.records_incomplete = True
                    log: object = type(observer).__name__
                    if isinstance(observer, JsonlWriter):
                        log = self.folder.metrics(self.group.rank)
                    text = f"{log} cannot be written ({error.strerror}): it lacks events"
                    self.emit(NoteEvent(f"{text}; training continues"))

    def replace_plan(self, plan: BatchPlan) -> None:
        """Changes how global batches are divided into micro-batches.

        All ranks call this between steps.
        """
        # The graphs were captured for the old size of this rank's micro-batches.
        self.step.drop_graphs()
        self.step.loader.close()
        self.step.loader = self.group.agree_on(
            "loader", lambda: self.make_loader(plan, self.progress.step)
        )
        self.plan = self.step.plan = plan
        self.state = replace(self.state, batches=plan)

    def change_epochs(self, epochs: int) -> None:
        """Changes the length of the run and its schedule. A collective between steps."""
        self.config = with_epochs(self.config, epochs)
        self.written = with_epochs(self.written, epochs)
        self.state = replace(self.state, config=self.config)
        self.replace_plan(replace(self.plan, epochs=epochs))
        self.schedule = create_schedule(self.config.optim, self.state.peak_lr, self.plan)
        if self.is_main:
            self.check_folder()
            self.folder.write_config(self.written)
        self.emit(LengthEvent(self.progress.step, self.plan.total_steps, epochs))

    def check_folder(self) -> None:
        """Checks on rank 0 that the run folder exists and that no other process has locked it."""
        if self.lock is not None:
            self.lock.check()

    def finish_save(self, *, wait: bool = True, run_fails: bool = False) -> None:
        """Reports a checkpoint that was written since the last call.

        Args:
            wait: True to wait for a checkpoint that is being written.
            run_fails: True if the run is failing. A write error is then emitted as a note; otherwise it
                ends the run at the next step.
        """
        written = self.writer.take_written(wait=wait)
        if written is None:
            return
        if written.note:
            self.emit(NoteEvent(written.note))
        if written.error is None:
            file, seconds = str(written.path), written.save_s
            self.emit(CheckpointEvent(written.step, file, seconds, written.best, written.stall_s))
        elif run_fails:
            self.emit(NoteEvent(str(written.error)))
        else:
            self.step.fault = written.error

    def write_trace(self) -> None:
        """Writes the trace of all ranks on rank 0; emits a note if that fails. All ranks call this."""
        try:
            note = self.trace.write()
        except CheckpointError as error:
            note = str(error)
        if note:
            self.emit(NoteEvent(note))

    def close(self) -> None:
        """Releases graphs, threads, files and connections of the run."""
        # CUDA graphs hold references to NCCL communicators, so they must go before the process groups.
        self.step.release()
        if not self.group.aborted:
            self.step.exchange.close()
        self.step.loader.close()
        self.source.close()
        self.validation.close()
        for observer in self.observers:
            # `emit` has already reported an error such as a full disk.
            with contextlib.suppress(OSError):
                observer.close()
        if self.lock is not None:
            self.lock.release()


def describe_run(
    training: Training,
    inputs: RunInputs,
    components: Components,
    checkpoint: Checkpoint | None,
    parts: StepParts,
    *,
    threads: str,
    scaling: str,
    hint: str,
    model_notes: list[str],
    pretrained: list[str],
) -> dict[str, str]:
    """Describes the automatic choices of a run, in the order of their display.

    Args:
        training: The run.
        inputs: The data and the folder of the run.
        components: Python objects that replace objects that the settings name.
        checkpoint: The checkpoint that the run resumes; None for a new run.
        parts: The parts of the training step.
        threads: Description of the number of threads.
        scaling: Description of the choices of `optim.scaling`.
        hint: A hint on the learning rate.
        model_notes: Notes on the model.
        pretrained: Notes on the pretrained weights.

    Returns:
        A line for each choice that applies, by name.
    """
    config, group, plan, step = training.config, training.group, training.plan, training.step
    source, loader = inputs.source, step.loader.describe()
    last_norms = config.model.norm_statistics == "last"
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": launcher_name(group.topology),
        "threads": threads,
        "data": f"{source.kind}, {len(source):,} training and {len(inputs.validation):,} validation "
        f"images, {len(source.classes)} classes",
        "input": loader,
        "model": _describe_model(config, training.model, components),
        "model notes": "; ".join(model_notes),
        # Notes of the sources that the description of the loader does not contain.
        "data notes": "; ".join(
            dict.fromkeys(s.note for s in (source, inputs.validation) if s.note not in loader)
        ),
        **parts.describe(),
        "batch": training.sizes.describe(plan.world_size),
        "no effect": describe_idle(config, plan.world_size),
        "peak_lr": f"{training.state.peak_lr:g}",
        "hint": hint,
        "scaling": scaling,
        **step.source.describe(),
        "batch norm": "evaluation with the statistics of the last micro-batches" * last_norms,
        "warm-up": training.schedule.describe_cut(),
        "noise scale": _describe_noise_scale(config, plan),
        "batch schedule": describe_stages(plan.global_batch, plan.growth) if plan.growth else "",
        "average": parts.average.describe(plan.samples / plan.last_batch) if parts.average else "",
        "pretrained": "; ".join(pretrained),
        "resume": _describe_resume(training.folder, checkpoint),
        "changed on resume": changes(checkpoint, config, LOCAL_SETTINGS.__contains__)
        if checkpoint
        else "",
        "exchange state": "; ".join(training.state.notes),
        "given in Python": _describe_objects(components),
        **step.strategy.describe(),
    }
    return {name: text for name, text in chosen.items() if text}


def _describe_objects(components: Components) -> str:
    """Lists the Python objects of the program, with a note that commands cannot create them."""
    names = [name.replace("_", " ") for name in components.names() if name != "callbacks"]
    if not names:
        return ""
    return (
        f"{', '.join(names)}; paceline eval, predict, export and --resume cannot create these: use this "
        "program, or name them as package.module:name"
    )


def _describe_model(config: RunConfig, model: nn.Module, components: Components) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    name = config.model.name
    if components.model is not None:
        name = f"{given_name(components.model)} (given in Python)"
    elif len(STEMS_OF_MODEL.get(name, ())) > 1:
        name += f" with the {config.model.stem_for(config.data.image_size)} stem"
    frozen = count_frozen(model)
    return f"{name}, {weights:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")


def _describe_resume(folder: RunFolder, checkpoint: Checkpoint | None) -> str:
    salvaged = ""
    if checkpoint is not None and checkpoint.salvaged_by is not None:
        salvaged = (
            f"not bit-exact: salvaged by rank {checkpoint.salvaged_by} after the loss of another rank; "
            "weights and momenta are exact, batch-norm statistics are of that rank only"
        )
    return "; ".join(filter(None, (folder.note, salvaged)))


def _describe_noise_scale(config: RunConfig, plan: BatchPlan) -> str:
    if not config.run.noise_scale:
        return ""
    count = -(-plan.last_batch // plan.micro_batch)
    if count < 2:
        remedy = "use several ranks or a smaller --batch-size"
        return f"not available: a step is one micro-batch; {remedy}"
    return f"estimated from up to {count} micro-batches of {plan.micro_batch} per step"
