"""Builds a run: folder, checkpoint, data, model, training step and loader.

`build` returns a `Training`, which the training loop runs. After each part that can fail on one rank
alone, all ranks compare errors, so that all ranks fail with the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.comm.group import Group
from paceline.config import Job, RunConfig
from paceline.core.errors import PacelineError
from paceline.core.host import StartUp
from paceline.data import BatchPlan, Source, TrainBatches, create_train_loader
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import is_own
from paceline.models.synced_norm import keep_last_statistics
from paceline.train.callbacks import CallbackRunner
from paceline.train.checkpoint import Checkpoint, CheckpointStore
from paceline.train.checkpoint_writer import CheckpointWriter
from paceline.train.choices import choose_settings
from paceline.train.components import Components
from paceline.train.fast_path import ModelLimits
from paceline.train.inputs import (
    RunInputs,
    agree_on_data,
    agree_on_folder,
    check_trackers,
    read_checkpoint,
)
from paceline.train.loss import LOSSES
from paceline.train.machine import choose_threads, explain_out_of_memory, seed_initial_weights
from paceline.train.micro_step import source_class
from paceline.train.model_checks import (
    VARIES,
    check_model,
    check_placed,
    given_name,
    make_model,
    share_weights,
)
from paceline.train.observers import RunTrace
from paceline.train.resolve import Facts, Resolved, refuse, resolve
from paceline.train.run_folder import RunFolder, RunLock, undone_on_error
from paceline.train.run_state import PinnedPlan, Progress, RunState, check_pinned
from paceline.train.step_parts import StepParts, create_parts, create_step
from paceline.train.stop_signals import StopSignals
from paceline.train.strategy import Strategy, create_strategy
from paceline.train.training import Training, describe_run


def build(
    config: RunConfig, group: Group, stop: StopSignals, components: Components | None = None,
    startup: StartUp | None = None,
) -> Training:  # fmt: skip
    """Builds data, model, training step and checkpoints of a run. All ranks call this.

    Args:
        config: The settings of the run.
        group: The ranks.
        stop: Records signals that ask to stop or to save.
        components: Python objects that replace objects that the settings name.
        startup: Records the time that each part of the start-up takes.

    Returns:
        The parts of the run.

    Raises:
        PacelineError: If the run cannot start on any rank.
    """
    components, startup = components or Components(), startup or StartUp()
    job = Job(processes=group.world_size, device=group.device.type)
    # Errors that do not depend on the data are raised before the data is opened.
    with _leaving_together(group):
        refuse(config, job, components)
    check_trackers(config)
    folder, lock = agree_on_folder(config, group)
    with undone_on_error(folder, lock):
        checkpoint, folder = read_checkpoint(config, folder, group)
        chosen = choose_settings(config, group, components, checkpoint, startup)
        config, pending = chosen.config, config.run.pending is not None
        inputs = agree_on_data(config, group, components)
        startup.end("data")
        # All ranks agree on settings, data and checkpoint, so all of them raise the same errors here.
        facts = Facts(
            job=job, program=components, samples=len(inputs.source),
            classes=len(inputs.source.classes), checkpoint=checkpoint,
        )  # fmt: skip
        resolved = resolve(config, facts)
        if (
            (config.optim.follows_rule or pending)
            and checkpoint is not None
            and folder.resume_from is not None
        ):
            check_pinned(checkpoint, resolved.config, folder.resume_from)
        training = _assemble(
            resolved, group, stop, inputs, (folder, lock), checkpoint, components, startup
        )
    training.chosen = {**chosen.reasons, **training.chosen}
    training.budget = chosen.budget
    return training


def _assemble(
    resolved: Resolved, group: Group, stop: StopSignals, inputs: RunInputs,
    place: tuple[RunFolder, RunLock | None], checkpoint: Checkpoint | None, components: Components,
    startup: StartUp,
) -> Training:  # fmt: skip
    config, plan, schedule = resolved.config, resolved.batches, resolved.schedule
    source, (folder, lock) = inputs.source, place
    threads = _set_threads(config, plan.world_size, group, checkpoint)
    strategy = create_strategy(config, group)
    if checkpoint is not None:
        strategy.load(checkpoint.strategy.get(strategy.name, {}))
    parts, model_notes, pretrained = _build_model(
        config, strategy, inputs, plan, schedule.rate(0), checkpoint, components, startup
    )
    model = parts.model
    plan = strategy.divide(plan, parts.probe)
    startup.end("step")

    state = RunState(
        config=config, batches=plan, exchange_plan=parts.exchange.plan, peak_lr=resolved.peak_lr,
        classes=tuple(source.classes), labels=inputs.labels, model=model,
        optimizer=parts.optimizer, batch_norm=parts.batch_norm, scale=parts.scale,
        average=parts.average, strategy=strategy, group=group, memory=parts.exchange.memory,
        constants=parts.plan_file.constants(),
    )  # fmt: skip
    make_loader = _loader_factory(config, source, parts, group, components)
    with group.phase("loader"):
        progress = Progress()
        if checkpoint is not None and folder.resume_from is not None:
            elsewhere = not folder.holds_its_checkpoint
            progress = state.restore(checkpoint, folder.resume_from, elsewhere=elsewhere)
        loader = make_loader(plan, progress.step)
    gradients = source_class(config).create(config, plan, make_loader)
    startup.end("loader")
    step = create_step(config, parts, loader, plan, group, stop, components, gradients)
    buckets = parts.exchange.bucket_info()
    group.name_buckets(buckets)
    trace = RunTrace(config.run, group, buckets, folder.path, progress.step)
    parts.exchange.observers = [group.board, trace.timeline]
    step.spans = trace.timeline
    training = Training(
        config=config, written=resolved.written, group=group, folder=folder, lock=lock,
        sizes=resolved.sizes, plan=plan, schedule=schedule, model=model, state=state, step=step,
        source=source, validation=inputs.validation, progress=progress, stop=stop,
        plan_file=parts.plan_file, trace=trace, make_loader=make_loader, startup=startup,
        store=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
        writer=CheckpointWriter(background=config.checkpoint.background),
    )  # fmt: skip
    training.chosen = describe_run(
        training, inputs, components, checkpoint, parts, threads=threads,
        scaling=resolved.scaling, hint=resolved.hint, model_notes=model_notes, pretrained=pretrained,
    )  # fmt: skip
    training.keeps_final_state = isinstance(components.model, nn.Module)
    if components.callbacks:
        training.callbacks = CallbackRunner(components.callbacks, training)
        training.state = replace(training.state, callbacks=training.callbacks.state)
        if checkpoint is not None:
            training.callbacks.restore(checkpoint.callbacks)
    return training


def _loader_factory(
    config: RunConfig, source: Source, parts: StepParts, group: Group, components: Components
) -> Callable[[BatchPlan, int], TrainBatches]:
    """Returns a function that creates this rank's loader for a batch plan, from a given step on."""

    def make_loader(batches: BatchPlan, first_step: int) -> TrainBatches:
        return create_train_loader(
            source, batches, config.data, seed=config.run.seed, first_step=first_step,
            rank=parts.strategy.computed_ranks, device=group.device, augment=components.augment,
        )  # fmt: skip

    return make_loader


def _build_model(
    config: RunConfig, strategy: Strategy, inputs: RunInputs, plan: BatchPlan, rate: float,
    checkpoint: Checkpoint | None, components: Components, startup: StartUp,
) -> tuple[StepParts, list[str], list[str]]:  # fmt: skip
    """Creates the model and the parts of its training step.

    Returns them with notes on the model and notes on the pretrained weights.
    """
    group, source = strategy.group, inputs.source
    with group.phase("model"):
        model, pretrained = _create_model(config, source, group, components)
        notes = _check_model(config, model, source, plan, components)
    if isinstance(components.model, nn.Module):
        notes += filter(None, [share_weights(model, group)])
    if config.model.norm_statistics == "last":
        keep_last_statistics(model)
    strategy.check_model(model)
    strategy.prepare(model, inputs)
    startup.end("model")
    varies = any(VARIES in note for note in notes)
    limits = ModelLimits.of(config.run, group, strategy.eager, varies)
    parts = create_parts(
        config, model, group, rate=rate,
        micro_batch=plan.micro_batch,
        accumulate=plan.accumulation > 1 or source_class(config).several_passes,
        pinned=PinnedPlan.of(checkpoint, config, plan.world_size) if checkpoint else None,
        steps_per_epoch=plan.samples / plan.last_batch, components=components,
        classes=config.model.num_classes or len(source.classes), limits=limits, strategy=strategy,
    )  # fmt: skip
    return parts, notes, pretrained


@contextmanager
def _leaving_together(group: Group) -> Iterator[None]:
    """Delays an error that all ranks raise until every rank has seen it.

    If a rank left immediately, it would close connections that slower ranks are still creating, and
    the backend of these ranks would raise a different error.
    """
    try:
        yield
    except PacelineError:
        group.all_reduce_sum(torch.zeros((), device=group.device))
        raise


def _set_threads(config: RunConfig, ranks: int, group: Group, checkpoint: Checkpoint | None) -> str:
    """Sets torch's number of threads and returns its description.

    A resumed run with the same number of ranks uses the checkpoint's number of threads, so that results
    are bit-identical.
    """
    threads, note = choose_threads(config, group.topology), ""
    if checkpoint and not config.run.threads and checkpoint.world_size == ranks:
        threads, note = checkpoint.threads, " (as in the checkpoint)"
    torch.set_num_threads(threads)
    return f"{threads}{note}"


def _create_model(
    config: RunConfig, source: Source, group: Group, components: Components
) -> tuple[nn.Module, list[str]]:
    """Creates the model with its initial or pretrained weights on this rank's device.

    Returns:
        The model and notes on the pretrained weights.
    """
    name = config.model.name if components.model is None else given_name(components.model)
    with explain_out_of_memory(
        f"while moving {name} to {group.device}", "free the device, or choose a smaller model"
    ):
        seed_initial_weights(config.run.seed)
        model = make_model(config, config.model.num_classes or len(source.classes), components)
        notes = []
        if config.run.pretrained:
            notes = load_pretrained(model, Path(config.run.pretrained))
        if config.run.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model = model.to(group.device)
        check_placed(model, group.device)
        return model, notes


def _check_model(
    config: RunConfig, model: nn.Module, source: Source, plan: BatchPlan, components: Components
) -> list[str]:
    """Checks a user's model and returns notes; raises an error if the model cannot be trained."""
    if is_own(model) and components.model is None:
        return []
    pixels = config.data.image_size
    return check_model(
        model, (plan.micro_batch, config.data.channels, pixels, pixels),
        config.model.num_classes or len(source.classes),
        own_loss=components.loss is not None or config.run.loss not in LOSSES,
        ranks=plan.world_size,
        nhwc=config.run.channels_last,
    )  # fmt: skip
