"""`Training`: the parts of one run, built and agreed upon by all ranks.

In: a configuration and the group. Out: model, data, optimizer, exchange and folder, ready for the
loop. Every stage that can fail on one rank alone is settled among all before the next begins.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from paceline.comm.gradient_exchange import GradientExchange
from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import PacelineError
from paceline.core.events import Event, Observer
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_train_loader
from paceline.data.normalize import Normalizer
from paceline.data.source import Source
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import create_model
from paceline.models.roles import parameter_groups
from paceline.optim.build import create_optimizer
from paceline.optim.lars import LARS
from paceline.optim.schedule import LrSchedule
from paceline.optim.settings import OptimSettings
from paceline.plan.fusion_plan import FusionPlan
from paceline.precision.loss_scale import LossScale
from paceline.precision.policy import Policy, allow_tf32, choose_policy
from paceline.train.batch_norm import BatchNormState
from paceline.train.batch_sizes import BatchSizes, resolve_batch_sizes
from paceline.train.checkpoint import Checkpoint
from paceline.train.checkpoint_shelf import CheckpointShelf
from paceline.train.fast_path import choose_fast_path
from paceline.train.inputs import RunInputs, agree_on_inputs, read_checkpoint
from paceline.train.machine import choose_threads
from paceline.train.memory import memory_error
from paceline.train.micro_step import MicroStep
from paceline.train.progress import Progress
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder
from paceline.train.run_state import RunState, changes
from paceline.train.seeds import seed_initial_weights
from paceline.train.step import TrainStep
from paceline.train.stop_signals import StopSignals
from paceline.train.update import Update
from paceline.train.weights_file import fingerprint


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
    source: Source
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
        self.source.close()
        self.validation.close()
        for observer in self.observers:
            # A record that a full disk refused was told when it was written; it is not told twice.
            with contextlib.suppress(OSError):
                observer.close()


def build(config: RunConfig, group: Group, stop: StopSignals) -> Training:
    """Builds the run on this rank, in step with all others."""
    sizes = resolve_batch_sizes(
        config.run.global_batch_size, config.run.batch_size, group.world_size
    )
    inputs = agree_on_inputs(config, group)
    with inputs.folder.discarded_on_error():
        checkpoint = read_checkpoint(config, inputs.folder, group)
        return _assemble(config, group, stop, sizes, inputs, checkpoint)


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
    policy = group.settled("precision", lambda: choose_policy(config.precision, group.device))
    allow_tf32(config.precision)
    model, notes = group.settled("model", lambda: _create_model(config, source, group))
    optimizer = create_master_optimizer(config.optim, model, policy, schedule.rate(0))
    batch_norm = BatchNormState(model)
    scale = LossScale(policy, config.precision)
    pinned = FusionPlan.from_table(checkpoint.plan) if checkpoint else None
    exchange = group.settled(
        "plan",
        lambda: GradientExchange(
            model.named_parameters(), group, pinned, accumulate=sizes.accumulation > 1
        ),
    )
    start = {"fusion plan": exchange.plan.fingerprint, "initial weights": fingerprint(model)}
    group.settle("start", facts=start, remedy="use the same --pretrained file and versions")
    fast = group.settled("speed", lambda: choose_fast_path(config.run, model, group.device))

    state = RunState(
        config, plan, exchange.plan, peak, tuple(source.classes), model, optimizer, batch_norm,
        scale, group, inputs.labels,
    )  # fmt: skip
    progress = Progress()
    if checkpoint is not None and folder.resume_from is not None:
        path = folder.resume_from
        progress = group.settled("resume", lambda: state.restore(checkpoint, path))
    loader = group.settled(
        "loader",
        lambda: create_train_loader(
            source, plan, config.data, seed=config.run.seed, rank=group.rank,
            first_step=progress.step, device=group.device,
        ),
    )  # fmt: skip
    normalize = Normalizer(
        config.data.mean, config.data.std, config.data.channels, policy.dtype,
        channels_out=fast.image_channels,
    )  # fmt: skip
    micro = MicroStep(
        fast.forward, policy, normalize, exchange, scale, config.run.smoothing, graphs=fast.graphs
    )
    step = TrainStep(
        model, micro, Update(model, optimizer, exchange, batch_norm, scale, graphs=fast.graphs),
        exchange, batch_norm, loader, normalize, policy, plan, group, stop, scale, config.run.seed,
    )  # fmt: skip
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": group.topology.launcher,
        "threads": threads,
        "data": f"{type(source).__name__}, {len(source):,} training and "
        f"{len(inputs.validation):,} validation images, {len(source.classes)} classes",
        "input": loader.describe(),
        "model": _describe_model(config, model),
        "precision": f"{policy.name}, loss scale {scale.describe()}",
        "optimizer": f"{config.optim.name}, {optimizer.path}",
        "speed": fast.describe(),
        "batch": sizes.describe(group.world_size),
        "peak_lr": f"{peak:g}",
    }
    if notes:
        chosen["pretrained"] = "; ".join(notes)
    if folder.note:
        chosen["resume"] = folder.note
    changed = changes(checkpoint, config, LOCAL_SETTINGS) if checkpoint else ""
    if changed:
        chosen["changed on resume"] = changed
    return Training(
        config, group, folder, sizes, plan, schedule, model, state, step, source, inputs.validation,
        CheckpointShelf(folder.checkpoints, config.checkpoint.keep), progress, stop, chosen,
    )  # fmt: skip


def _choose_threads(config: RunConfig, group: Group, checkpoint: Checkpoint | None) -> str:
    """Sets torch's threads and says how many. A checkpoint's count makes a resume bit-identical."""
    threads, why = choose_threads(config, group.topology), ""
    if checkpoint and not config.run.threads and checkpoint.world_size == group.world_size:
        threads, why = checkpoint.threads, " (as in the checkpoint)"
    torch.set_num_threads(threads)
    return f"{threads}{why}"


def _describe_model(config: RunConfig, model: nn.Module) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    stem = config.model.stem_for(config.data.image_size)
    stemmed = f" with the {stem} stem" if config.model.name.startswith("resnet") else ""
    return f"{config.model.name}{stemmed}, {weights:,} parameters"


def create_master_optimizer(
    settings: OptimSettings, model: nn.Module, policy: Policy, rate: float
) -> LARS:
    """Rounds the model's weights to the policy's format; the masters keep them as they were drawn."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.decay_bias_norm:
        groups = [{**group, "weight_decay": settings.weight_decay} for group in groups]
    drawn = [p.detach().clone() for group in groups for p in group["params"]]
    policy.convert(model)
    optimizer = create_optimizer(settings, groups, rate)
    for master, weights in zip(optimizer.masters(), drawn, strict=True):
        master.detach().copy_(weights)
    return optimizer


def _create_model(config: RunConfig, source: Source, group: Group) -> tuple[nn.Module, list[str]]:
    """Initial weights on this rank's device; a device too full for them is the user's to mend."""
    try:
        return _create_model_on(config, source, group)
    except (RuntimeError, MemoryError) as error:
        fault = memory_error(error, f"while placing {config.model.name} on {group.device}",
                             "free the device, or choose a smaller model")  # fmt: skip
        raise fault or error from error


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
