"""`Training`: the parts of one run, built and agreed upon by all ranks.

In: a configuration and the group. Out: model, data, optimizer, exchange and folder, ready for the
loop. Every stage that can fail on one rank alone is settled among all before the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from paceline.comm.agreement import PeerError
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import PacelineError
from paceline.core.events import Event, NoteEvent, Observer
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_train_loader
from paceline.data.sources.source_protocol import Source, source_kind
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import create_model
from paceline.optim.schedule import LrSchedule
from paceline.plan.plan_file import PlanFile
from paceline.train.checkpoint import Checkpoint, CheckpointShelf
from paceline.train.inputs import (
    BatchSizes,
    RunInputs,
    agree_on_inputs,
    read_checkpoint,
    resolve_batch_sizes,
)
from paceline.train.machine import choose_threads, memory_told, seed_initial_weights
from paceline.train.pinned_plan import PinnedPlan
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder
from paceline.train.run_lock import RunLock
from paceline.train.run_state import Progress, RunState, changes
from paceline.train.step import TrainStep
from paceline.train.step_parts import create_parts, create_step
from paceline.train.stop_signals import StopSignals
from paceline.train.tracing import RunTrace
from paceline.train.weights import fingerprint


@dataclass(kw_only=True)
class Training:
    """What the loop needs. `chosen` lists what was decided automatically, for display and record."""

    config: RunConfig
    group: Group
    folder: RunFolder
    sizes: BatchSizes
    plan: BatchPlan
    schedule: LrSchedule
    model: nn.Module
    state: RunState
    step: TrainStep
    source: Source
    validation: Source
    shelf: CheckpointShelf
    progress: Progress
    stop: StopSignals
    chosen: dict[str, str]
    plan_file: PlanFile
    trace: RunTrace
    lock: RunLock | None
    observers: list[Observer] = field(default_factory=list)
    # The step of the newest checkpoint in the folder, equal on all ranks; -1 where there is none.
    saved_step: int = -1

    @property
    def is_main(self) -> bool:
        return self.group.rank == 0

    def emit(self, event: Event) -> None:
        """Shows an event to all observers; one that cannot write fails the run at the next step."""
        for observer in self.observers:
            try:
                observer.on_event(event)
            except OSError as error:
                self.step.fault = PacelineError(
                    f"cannot write the run's records in {self.folder.path}: {error.strerror}",
                    "free space or choose another --output, then --resume auto",
                )

    def check_folder(self) -> None:
        """Before rank 0 writes: the folder is there, and still this run's."""
        if self.lock is not None:
            self.lock.check()

    def write_trace(self) -> None:
        """All ranks give their spans; rank 0 writes. A failure waits for the next exchange."""
        try:
            note = self.trace.write()
        except PeerError:
            raise  # another rank's fault, not ours to post
        except PacelineError as error:
            self.step.fault = error
            return
        if note:
            self.emit(NoteEvent(note))

    def close(self) -> None:
        # CUDA graphs hold references to NCCL's communicators, so they go before the process groups.
        self.step.release()
        if not self.group.aborted:
            self.step.exchange.close()
        self.step.loader.close()
        self.source.close()
        self.validation.close()
        for observer in self.observers:
            # A record that a full disk refused was told when it was written; it is not told twice.
            with contextlib.suppress(OSError):
                observer.close()
        if self.lock is not None:
            self.lock.release()


def build(config: RunConfig, group: Group, stop: StopSignals) -> Training:
    """Builds the run on this rank, in step with all others."""
    sizes = resolve_batch_sizes(
        config.run.global_batch_size, config.run.batch_size, group.world_size
    )
    inputs = agree_on_inputs(config, group)
    with inputs.discarded_on_error():
        checkpoint, folder = read_checkpoint(config, inputs.folder, group)
        if checkpoint is not None and "warmup_max_share" not in checkpoint.config.get("optim", {}):
            # Written before there was such a setting: the run goes on with its own schedule.
            config = config.with_values({"optim.warmup_max_share": 1.0})
        return _assemble(config, group, stop, sizes, replace(inputs, folder=folder), checkpoint)


def _assemble(
    config: RunConfig,
    group: Group,
    stop: StopSignals,
    sizes: BatchSizes,
    inputs: RunInputs,
    checkpoint: Checkpoint | None,
) -> Training:
    source, folder = inputs.source, inputs.folder
    threads = _choose_threads(config, group, checkpoint)
    plan = BatchPlan(
        samples=len(source),
        epochs=config.run.epochs,
        global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch,
        world_size=group.world_size,
    )
    peak = config.optim.peak_lr(sizes.global_batch)
    schedule = LrSchedule(config.optim, peak, plan.total_steps, plan.samples / plan.global_batch)
    model, notes = group.agree_on("model", lambda: _create_model(config, source, group))
    parts = create_parts(
        config, model, group, rate=schedule.rate(0), micro_batch=sizes.micro_batch,
        accumulate=sizes.accumulation > 1,
        pinned=PinnedPlan.of(checkpoint, config, group.world_size) if checkpoint else None,
        steps_per_epoch=schedule.steps_per_epoch,
    )  # fmt: skip
    fusion = parts.exchange.plan
    start = {"initial weights": fingerprint(model)}
    group.agree("start", facts=start, remedy="use the same --pretrained file and versions")

    state = RunState(
        config, plan, fusion, peak, tuple(source.classes), model, parts.optimizer,
        parts.batch_norm, parts.scale, group, parts.average, inputs.labels,
    )  # fmt: skip
    progress = Progress()
    if checkpoint is not None and folder.resume_from is not None:
        path = folder.resume_from
        elsewhere = not folder.holds_its_checkpoint
        progress = group.agree_on(
            "resume", lambda: state.restore(checkpoint, path, elsewhere=elsewhere)
        )
    loader = group.agree_on(
        "loader",
        lambda: create_train_loader(
            source, plan, config.data, seed=config.run.seed, rank=group.rank,
            first_step=progress.step, device=group.device,
        ),
    )  # fmt: skip
    step = create_step(config, parts, loader, plan, group, stop)
    buffers = parts.exchange.bucket_info()
    group.name_buckets(buffers)
    trace = RunTrace(config.run, group, buffers, folder.path, progress.step)
    parts.exchange.observer, step.spans = trace.beside(group.board), trace.spans
    average = parts.average.describe(schedule.steps_per_epoch) if parts.average else ""
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": group.topology.launcher,
        "threads": threads,
        "data": _describe_data(inputs),
        "input": loader.describe(),
        "model": _describe_model(config, model),
        **parts.describe(),
        "batch": sizes.describe(group.world_size),
        "peak_lr": f"{peak:g}",
        **_remarks(config, folder, checkpoint, average, notes, schedule),
    }
    return Training(
        config=config,
        group=group,
        folder=folder,
        sizes=sizes,
        plan=plan,
        schedule=schedule,
        model=model,
        state=state,
        step=step,
        source=source,
        validation=inputs.validation,
        shelf=CheckpointShelf(folder.checkpoints, config.checkpoint.keep),
        progress=progress,
        stop=stop,
        chosen=chosen,
        plan_file=parts.plan_file,
        trace=trace,
        lock=inputs.lock,
    )


def _remarks(
    config: RunConfig,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    average: str,
    pretrained: Sequence[str],
    schedule: LrSchedule,
) -> dict[str, str]:
    """What is told only where there is something to tell."""
    remarks = {
        "warm-up": schedule.describe_cut(),
        "average": average,
        "pretrained": "; ".join(pretrained),
        "resume": "; ".join(filter(None, (folder.note, _salvaged(checkpoint)))),
        "changed on resume": changes(checkpoint, config, LOCAL_SETTINGS) if checkpoint else "",
    }
    return {name: words for name, words in remarks.items() if words}


def _salvaged(checkpoint: Checkpoint | None) -> str:
    if checkpoint is None or checkpoint.salvaged_by is None:
        return ""
    return (
        f"not bit-exact: salvaged by rank {checkpoint.salvaged_by} after the loss of another rank; "
        "weights and momenta are exact, batch-norm statistics are that rank's alone"
    )


def _choose_threads(config: RunConfig, group: Group, checkpoint: Checkpoint | None) -> str:
    """Sets torch's threads and says how many. A checkpoint's count makes a resume bit-identical."""
    threads, why = choose_threads(config, group.topology), ""
    if checkpoint and not config.run.threads and checkpoint.world_size == group.world_size:
        threads, why = checkpoint.threads, " (as in the checkpoint)"
    torch.set_num_threads(threads)
    return f"{threads}{why}"


def _describe_data(inputs: RunInputs) -> str:
    source = inputs.source
    return (
        f"{source_kind(source)}, {len(source):,} training and {len(inputs.validation):,} "
        f"validation images, {len(source.classes)} classes"
    )


def _describe_model(config: RunConfig, model: nn.Module) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    stem = config.model.stem_for(config.data.image_size)
    stemmed = f" with the {stem} stem" if config.model.name.startswith("resnet") else ""
    return f"{config.model.name}{stemmed}, {weights:,} parameters"


def _create_model(config: RunConfig, source: Source, group: Group) -> tuple[nn.Module, list[str]]:
    """Initial weights on this rank's device; a device too full for them is the user's to mend."""
    where = f"while placing {config.model.name} on {group.device}"
    with memory_told(where, "free the device, or choose a smaller model"):
        return _create_model_on(config, source, group)


def _create_model_on(
    config: RunConfig, source: Source, group: Group
) -> tuple[nn.Module, list[str]]:
    seed_initial_weights(config.run.seed)
    model = create_model(
        config.model,
        num_classes=config.model.num_classes or len(source.classes),
        in_channels=config.data.channels,
        image_size=config.data.image_size,
    )
    notes = []
    if config.run.pretrained:
        notes = load_pretrained(model, Path(config.run.pretrained))
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(group.device), notes
