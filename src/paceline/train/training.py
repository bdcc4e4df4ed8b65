"""`Training`: the parts of one run, built and agreed upon by all ranks.

In: a configuration and the group. Out: model, data, optimizer, exchange and folder, ready for the
loop. Every stage that can fail on one rank alone is settled among all before the next begins.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.core.events import Event, Observer
from paceline.data.batch_plan import BatchPlan
from paceline.data.loader import TrainLoader
from paceline.data.normalize import Normalizer
from paceline.data.source import Source, open_source
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import create_model
from paceline.models.roles import parameter_groups
from paceline.optim.build import create_optimizer
from paceline.optim.schedule import LrSchedule
from paceline.plan.fusion_plan import FusionPlan
from paceline.train.batch_norm import BatchNormState
from paceline.train.batch_sizes import BatchSizes, resolve_batch_sizes
from paceline.train.checkpoint import Checkpoint, read_file
from paceline.train.checkpoint_shelf import CheckpointShelf
from paceline.train.machine import choose_threads, versions
from paceline.train.progress import Progress
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, choose_run_folder
from paceline.train.run_state import RunState, check_pinned
from paceline.train.seeds import seed_initial_weights
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals

Made = TypeVar("Made")


@dataclass
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
    validation: Source
    shelf: CheckpointShelf
    progress: Progress
    stop: StopSignals
    chosen: dict[str, str]
    observers: list[Observer] = field(default_factory=list)

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

    def close(self) -> None:
        self.step.loader.close()
        self.validation.close()
        for observer in self.observers:
            # A record that a full disk refused was told when it was written; it is not told twice.
            with contextlib.suppress(OSError):
                observer.close()


def build(config: RunConfig, group: Group, stop: StopSignals) -> Training:
    """Builds the run on this rank, in step with all others."""
    group.settle("configuration", facts=_common_facts(config))
    sizes = resolve_batch_sizes(
        config.run.global_batch_size, config.run.batch_size, group.world_size
    )
    source, validation = _settled(group, "data", lambda: _open_data(config))
    facts = _data_facts(source, validation)
    group.settle("data set", facts=facts, remedy="use the same data")
    folder = _agree_on_folder(config, group)
    checkpoint = _read_checkpoint(config, folder, group)
    threads = checkpoint.threads if checkpoint else choose_threads(config, group.topology)
    torch.set_num_threads(threads)

    model, notes = _settled(group, "model", lambda: _create_model(config, source, group))
    plan = BatchPlan(
        samples=len(source),
        epochs=config.run.epochs,
        global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch,
        world_size=group.world_size,
    )
    peak = config.optim.peak_lr(sizes.global_batch)
    schedule = LrSchedule(config.optim, peak, plan.total_steps, plan.samples / plan.global_batch)
    groups = parameter_groups(model, config.optim.weight_decay)
    if config.optim.decay_bias_norm:
        groups = [{**group_, "weight_decay": config.optim.weight_decay} for group_ in groups]
    optimizer = create_optimizer(config.optim, groups, schedule.rate(0))
    batch_norm = BatchNormState(model)
    pinned = FusionPlan.from_table(checkpoint.plan) if checkpoint else None
    exchange = _settled(
        group, "plan", lambda: GradientExchange(model.named_parameters(), group, pinned)
    )
    group.settle("fusion plan", facts={"fusion plan": exchange.plan.fingerprint})

    state = RunState(
        config,
        plan,
        exchange.plan,
        peak,
        tuple(source.classes),
        model,
        optimizer,
        batch_norm,
        group,
        str(facts["training labels (digest)"]),
    )
    progress = Progress()
    if checkpoint is not None and folder.resume_from is not None:
        path = folder.resume_from
        progress = _settled(group, "resume", lambda: state.restore(checkpoint, path))
    loader = TrainLoader(
        source,
        plan,
        config.data,
        seed=config.run.seed,
        rank=group.rank,
        first_step=progress.step,
        pin_memory=group.device.type == "cuda",
    )
    normalize = Normalizer(config.data.mean, config.data.std, config.data.channels)
    step = TrainStep(
        model, optimizer, exchange, batch_norm, loader, normalize, plan, group, stop,
        config.run.smoothing, config.run.seed,
    )  # fmt: skip
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": group.topology.launcher,
        "threads": str(threads) + (" (as in the checkpoint)" if checkpoint else ""),
        "batch": f"{sizes.global_batch} = {sizes.micro_batch} a process × {group.world_size} "
        f"rank(s) × {sizes.accumulation} micro-step(s)",
        "peak_lr": f"{peak:g}",
    }
    for number, note in enumerate(notes):
        chosen[f"pretrained_{number}" if number else "pretrained"] = note
    return Training(
        config, group, folder, sizes, plan, schedule, model, state, step, validation,
        CheckpointShelf(folder.checkpoints, config.checkpoint.keep), progress, stop, chosen,
    )  # fmt: skip


def _settled(group: Group, phase: str, make: Callable[[], Made]) -> Made:
    """Makes something on this rank; if that fails on any rank, all raise the same error."""
    made, error = None, None
    try:
        made = make()
    except PacelineError as caught:
        error = caught
    group.settle(phase, error)
    assert made is not None
    return made


def _common_facts(config: RunConfig) -> dict[str, object]:
    """What must be equal on all ranks: all settings but a node's own paths and worker counts."""
    own = LOCAL_SETTINGS | {"data.dir"}
    facts = {name: value for name, value in config.flat().items() if name not in own}
    return facts | {f"version of {name}": v for name, v in versions().items() if name != "cuda"}


def _open_data(config: RunConfig) -> tuple[Source, Source]:
    source = open_source(config.data, "train")
    validation = open_source(config.data, "val", source.classes)
    if list(source.classes) != list(validation.classes):
        raise DataError(
            f"training has {len(source.classes)} classes, validation {len(validation.classes)}, "
            "or their names differ",
            "give both splits the same class folders, or one classes.json",
        )
    declared = config.model.num_classes
    if declared is not None and declared < len(source.classes):
        raise ConfigError(
            "model.num_classes", declared, f"but the data has {len(source.classes)} classes",
            "raise it, or leave it out to take the data's",
        )  # fmt: skip
    return source, validation


def _data_facts(source: Source, validation: Source) -> dict[str, object]:
    facts: dict[str, object] = {}
    for split, found in (("training", source), ("validation", validation)):
        facts[f"{split} images"] = len(found)
        facts[f"{split} labels (digest)"] = hashlib.sha256(found.labels.tobytes()).hexdigest()[:12]
    return facts


def _create_model(config: RunConfig, source: Source, group: Group) -> tuple[nn.Module, list[str]]:
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


def _agree_on_folder(config: RunConfig, group: Group) -> RunFolder:
    """Rank 0 chooses; the others are told."""
    folder: RunFolder | None = None
    error: PacelineError | None = None
    if group.rank == 0:
        try:
            folder = choose_run_folder(config, restarted=group.restarted)
        except PacelineError as caught:
            error = caught
    group.settle("run folder", error)
    told = f"{folder.path}\n{folder.resume_from or ''}".encode() if folder else None
    path, _, resume = group.broadcast_bytes(told).decode().partition("\n")
    return RunFolder(Path(path), Path(resume) if resume else None)


def _read_checkpoint(config: RunConfig, folder: RunFolder, group: Group) -> Checkpoint | None:
    """Rank 0 reads and sends the bytes, so that only its node needs the file."""
    if folder.resume_from is None:
        return None
    content, error = None, None
    if group.rank == 0:
        try:
            content = read_file(folder.resume_from)
        except PacelineError as caught:
            error = caught
    group.settle("checkpoint", error)
    sent, path = group.broadcast_bytes(content), folder.resume_from

    def parse() -> Checkpoint:
        found = Checkpoint.from_bytes(sent, path)
        check_pinned(found, config, path)
        return found

    return _settled(group, "checkpoint content", parse)
