"""Builds a run: data, folder, checkpoint, model, training step and loader.

`build` returns a `Training`, which the loop runs. Every stage that can fail on one rank alone is
agreed among all ranks before the next begins, so that all ranks fail with the same error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from paceline.comm.agreement import PeerError
from paceline.comm.group import Group
from paceline.comm.rehearsal import RehearsedExchange
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.events import CheckpointEvent, Event, NoteEvent, Observer
from paceline.data import BatchPlan, Source, TrainBatches, create_train_loader, describe_channels
from paceline.models.freeze import count_frozen
from paceline.models.names import MODEL_NAMES
from paceline.models.pretrained import load_pretrained
from paceline.models.registry import is_own
from paceline.optim.batch_growth import describe_stages
from paceline.optim.schedule import LrSchedule
from paceline.optim.settings import ANCHORED, OptimSettings
from paceline.optim.svrg import SVRG
from paceline.plan.plan_file import PlanFile
from paceline.plan.rehearsal import ClusterClock, cluster_clock
from paceline.train.callbacks import CallbackRunner
from paceline.train.checkpoint import Checkpoint, CheckpointStore
from paceline.train.checkpoint_writer import CheckpointWriter
from paceline.train.components import Components
from paceline.train.fast_path import describe_norms, eager_norms, share_norms
from paceline.train.inputs import (
    BatchSizes,
    RunInputs,
    agree_on_inputs,
    apply_scaling,
    batch_stages,
    eval_batch,
    read_checkpoint,
    refuse_on_servers,
    refuse_with_svrg,
    requested_batch,
    resolve_batch_sizes,
)
from paceline.train.loss import LOSSES
from paceline.train.machine import choose_threads, explain_out_of_memory, seed_initial_weights
from paceline.train.model_checks import (
    VARIES,
    check_model,
    check_placed,
    given_name,
    make_model,
    share_weights,
)
from paceline.train.observers import RunTrace
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, RunLock
from paceline.train.run_state import PinnedPlan, Progress, RunState, changes
from paceline.train.shares import with_shares
from paceline.train.step import Anchors, TrainStep
from paceline.train.step_parts import StepParts, create_parts, create_step
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
    chosen: dict[str, str]
    make_loader: Callable[[BatchPlan, int], TrainBatches]
    # Of a rehearsal, where the planner knows the cluster's times.
    clock: ClusterClock | None = None
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

    def finish_last_save(self) -> None:
        """Of a run that fails: a save that fails too is a note, since no step follows that would report
        it."""
        error = self._report_save(wait=True)
        if error is not None:
            self.emit(NoteEvent(str(error)))

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


def build(
    config: RunConfig, group: Group, stop: StopSignals, components: Components | None = None
) -> Training:
    """Builds the run on this rank, together with all others."""
    components = components or Components()
    # What is wrong whatever the data is reported before the data is opened.
    _check_rehearsal(config, group)
    ranks = _ranks(config, group)
    resolve_batch_sizes(*requested_batch(config, ranks))
    refuse_with_svrg(config, components, group.device.type)
    refuse_on_servers(config, components)
    inputs = agree_on_inputs(config, group, components)
    with inputs.discarded_on_error():
        given, samples = components.optimizer is not None, len(inputs.source)
        # Refused alike on all ranks, which have agreed on the settings and on the data.
        config, scaling = apply_scaling(config, samples, ranks, own_optimizer=given)
        asked = requested_batch(config, ranks)
        sizes = resolve_batch_sizes(*asked, samples=samples)
        checkpoint, folder = read_checkpoint(config, inputs.folder, group)
        if checkpoint is not None and "warmup_max_share" not in checkpoint.config.get("optim", {}):
            # The checkpoint is older than this setting, and continues with its own schedule.
            config = config.with_values({"optim.warmup_max_share": 1.0})
        return _assemble(
            config, group, stop, sizes, replace(inputs, folder=folder), checkpoint, components,
            scaling,
        )  # fmt: skip


def _assemble(
    config: RunConfig,
    group: Group,
    stop: StopSignals,
    sizes: BatchSizes,
    inputs: RunInputs,
    checkpoint: Checkpoint | None,
    components: Components,
    scaling: str,
) -> Training:
    source, folder = inputs.source, inputs.folder
    threads = _set_threads(config, group, checkpoint)
    plan = BatchPlan(
        samples=len(source),
        epochs=config.run.epochs,
        global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch,
        world_size=_ranks(config, group),
        growth=batch_stages(config.optim, sizes, group.world_size),
    )
    peak = config.optim.peak_lr(sizes.global_batch)
    schedule = create_schedule(config.optim, peak, plan)
    with group.phase("model"):
        model, pretrained = _create_model(config, source, group, components)
        model_notes = _check_model(config, model, source, sizes, group, components)
    if isinstance(components.model, nn.Module):
        model_notes += filter(None, [share_weights(model, group)])
    norm_group = share_norms(config, model, group)
    graphs_config = _graphs_for(eager_norms(config, norm_group), model_notes, group)
    parts = create_parts(
        graphs_config, model, group, rate=schedule.rate(0), micro_batch=sizes.micro_batch,
        accumulate=plan.accumulation > 1 or config.optim.name in ANCHORED,
        pinned=PinnedPlan.of(checkpoint, config, plan.world_size) if checkpoint else None,
        steps_per_epoch=plan.samples / plan.last_batch, components=components,
        classes=config.model.num_classes or len(source.classes),
    )  # fmt: skip
    plan, shares = with_shares(config, plan, group, checkpoint, parts.probe)

    clock = _cluster_clock(config, parts, plan, inputs)
    runner: list[CallbackRunner] = []
    state = RunState(
        config=config, batches=plan, exchange_plan=parts.exchange.plan, peak_lr=peak,
        classes=tuple(source.classes), labels=inputs.labels, model=model,
        optimizer=parts.optimizer, batch_norm=parts.batch_norm, scale=parts.scale,
        average=parts.average, group=group, memory=parts.exchange.memory,
        callbacks=lambda: runner[0].state() if runner else {},
    )  # fmt: skip
    progress = Progress()

    def make_loader(batches: BatchPlan, first_step: int) -> TrainBatches:
        return create_train_loader(
            source, batches, config.data, seed=config.run.seed, rank=_computed_ranks(parts, group),
            first_step=first_step, device=group.device, augment=components.augment,
        )  # fmt: skip

    with group.phase("loader"):
        if checkpoint is not None and folder.resume_from is not None:
            path, elsewhere = folder.resume_from, not folder.holds_its_checkpoint
            progress = state.restore(checkpoint, path, elsewhere=elsewhere)
        loader = make_loader(plan, progress.step)
    anchors = _anchors(config, source, plan, parts, group, components)
    step = create_step(config, parts, loader, plan, group, stop, components, norm_group, anchors)
    buffers = parts.exchange.bucket_info()
    group.name_buckets(buffers)
    trace = RunTrace(config.run, group, buffers, folder.path, progress.step)
    parts.exchange.observer, step.spans = trace.beside(group.board), trace.spans
    chosen = {
        "device": str(group.device),
        "backend": group.backend,
        "launcher": group.topology.launcher,
        "threads": threads,
        "data": _describe_data(inputs),
        "input": loader.describe(),
        "model": _describe_model(config, model, components),
        **({"model notes": "; ".join(model_notes)} if model_notes else {}),
        **_data_notes(config, inputs, components, loader.describe()),
        **parts.describe(),
        "batch": sizes.describe(plan.world_size),
        **({"shares": shares} if shares else {}),
        "peak_lr": f"{peak:g}",
        **({"scaling": scaling} if scaling else {}),
        **_describe_anchors(anchors),
        **describe_norms(config, group, norm_group),
        **_optional_notes(config, folder, checkpoint, parts, pretrained, schedule, plan),
        **({"exchange state": "; ".join(state.notes)} if state.notes else {}),
        **_describe_rehearsal(config, clock),
        **_given_objects(components),
    }
    training = Training(
        config=config, group=group, folder=folder, lock=inputs.lock, sizes=sizes, plan=plan,
        schedule=schedule, model=model, state=state, step=step, source=source,
        validation=inputs.validation, progress=progress, stop=stop, plan_file=parts.plan_file,
        trace=trace, chosen=chosen, make_loader=make_loader, clock=clock,
        store=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
        writer=CheckpointWriter(background=config.checkpoint.background),
    )  # fmt: skip
    training.keeps_final_state = isinstance(components.model, nn.Module)
    if components.callbacks:
        training.callbacks = CallbackRunner(components.callbacks, training)
        runner.append(training.callbacks)
        if checkpoint is not None:
            training.callbacks.restore(checkpoint.callbacks)
    return training


def create_schedule(settings: OptimSettings, peak: float, plan: BatchPlan) -> LrSchedule:
    """The schedule in time units of the plan's first batch."""
    per_epoch = plan.samples / plan.global_batch
    if not plan.growth:
        return LrSchedule(settings, peak, plan.total_steps, per_epoch)
    return LrSchedule(settings, peak, plan.epochs * per_epoch, per_epoch, plan.position)


def _anchors(
    config: RunConfig, source: Source, plan: BatchPlan, parts: StepParts, group: Group,
    components: Components,
) -> Anchors | None:  # fmt: skip
    """The full-gradient passes of SVRG and its relatives; None for other optimizers."""
    optimizer = parts.optimizer
    if not isinstance(optimizer, SVRG) or not optimizer.anchored:
        return None
    # As many micro-batches to a step as there are ranks: only their sum counts.
    whole = replace(plan, epochs=1, global_batch=plan.micro_batch * plan.world_size)

    def loader() -> TrainBatches:
        return create_train_loader(
            source, whole, config.data, seed=config.run.seed, rank=group.rank, first_step=0,
            device=group.device, augment=components.augment,
        )  # fmt: skip

    interval = max(1, round(config.optim.center_epochs * plan.steps_per_epoch))
    return Anchors(optimizer, interval, whole, loader)


def _describe_anchors(anchors: Anchors | None) -> dict[str, str]:
    if anchors is None:
        return {}
    return {
        "full gradient": f"every {anchors.interval:,} steps, over {anchors.plan.samples:,} images"
    }


def _ranks(config: RunConfig, group: Group) -> int:
    """Ranks that share a global batch: those of this job, or of the cluster that it rehearses."""
    return config.rehearse.ranks or group.world_size


def _check_rehearsal(config: RunConfig, group: Group) -> None:
    if config.rehearse.ranks and group.world_size > 1:
        raise ConfigError(
            "rehearse.nodes", config.rehearse.nodes,
            f"a rehearsal runs in one process, and this job has {group.world_size}",
            "start it without a launcher",
        )  # fmt: skip


def _computed_ranks(parts: StepParts, group: Group) -> int | Sequence[int]:
    """The ranks whose micro-batches this process computes, in this order."""
    exchange = parts.exchange
    return exchange.order if isinstance(exchange, RehearsedExchange) else group.rank


def _cluster_clock(
    config: RunConfig, parts: StepParts, plan: BatchPlan, inputs: RunInputs
) -> ClusterClock | None:
    """None where the run is no rehearsal, or says nothing about the cluster's speed."""
    settings = config.rehearse
    if not settings.ranks:
        return None
    classes = config.model.num_classes or len(inputs.source.classes)
    model, size = config.model, config.data.image_size
    stem, half = model.stem_for(size), config.precision.amp_dtype != "fp32"
    settings.check_batch(model.name, size, classes, stem=stem, batch=plan.micro_batch, half=half)
    work = settings.workload(model.name, size, classes, stem)
    if work is None:
        return None
    return cluster_clock(
        settings, parts.exchange.plan, work, batch=plan.micro_batch,
        accumulation=plan.accumulation, validation=len(inputs.validation),
        eval_batch=eval_batch(plan.micro_batch),
        left_out=settings.left_out(config.optim.name, half=half),
    )  # fmt: skip


def _describe_rehearsal(config: RunConfig, clock: ClusterClock | None) -> dict[str, str]:
    settings = config.rehearse
    if not settings.ranks:
        return {}
    unknown = "none: give --gpu, --profile or --cluster for the cluster's time"
    return {
        "rehearsal": f"of {settings.ranks:,} ranks on {settings.nodes:,} node(s), in one process",
        "clock": unknown if clock is None else clock.describe(),
    }


def _set_threads(config: RunConfig, group: Group, checkpoint: Checkpoint | None) -> str:
    """Sets torch's number of threads. A resumed run uses the checkpoint's, to be bit-identical."""
    threads, note = choose_threads(config, group.topology), ""
    if checkpoint and not config.run.threads and checkpoint.world_size == _ranks(config, group):
        threads, note = checkpoint.threads, " (as in the checkpoint)"
    torch.set_num_threads(threads)
    return f"{threads}{note}"


def _create_model(
    config: RunConfig, source: Source, group: Group, components: Components
) -> tuple[nn.Module, list[str]]:
    """The model with its initial or pretrained weights on this rank's device, and notes on the file."""
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


def _graphs_for(config: RunConfig, notes: list[str], group: Group) -> RunConfig:
    """Without CUDA graphs where the model, on any rank, keeps state or draws numbers in Python: a graph
    would repeat what they were when it was captured."""
    if group.device.type != "cuda" or config.run.cuda_graphs == "off":
        return config
    varies = torch.tensor(float(any(VARIES in note for note in notes)), device=group.device)
    group.all_reduce_sum(varies)
    if not varies:
        return config
    if config.run.cuda_graphs == "on":
        raise ConfigError(
            "run.cuda_graphs", "on", f"the model {VARIES}, which a CUDA graph would freeze",
            "use 'auto', or draw with torch's generators",
        )  # fmt: skip
    return config.with_values({"run.cuda_graphs": "off"})


def _check_model(
    config: RunConfig, model: nn.Module, source: Source, sizes: BatchSizes, group: Group,
    components: Components,
) -> list[str]:  # fmt: skip
    """Notes on a model that Paceline has not made; raises where it cannot be trained."""
    if is_own(model) and components.model is None:
        return []
    pixels = config.data.image_size
    return check_model(
        model, (sizes.micro_batch, config.data.channels, pixels, pixels),
        config.model.num_classes or len(source.classes),
        own_loss=components.loss is not None or config.run.loss not in LOSSES,
        ranks=_ranks(config, group),
        nhwc=config.run.channels_last,
    )  # fmt: skip


def _given_objects(components: Components) -> dict[str, str]:
    """Objects of the program that the command line cannot make again."""
    names = [name for name in components.names() if name != "callbacks"]
    if not names:
        return {}
    listed = ", ".join(name.replace("_", " ") for name in names)
    return {
        "given in Python": f"{listed}; paceline eval, predict, export and --resume cannot make these: "
        "use this program, or name them as package.module:name"
    }


def _describe_data(inputs: RunInputs) -> str:
    source = inputs.source
    return (
        f"{source.kind}, {len(source):,} training and {len(inputs.validation):,} "
        f"validation images, {len(source.classes)} classes"
    )


def _data_notes(
    config: RunConfig, inputs: RunInputs, components: Components, described: str
) -> dict[str, str]:
    """What the user should know about the data beyond what `described` says of the input."""
    sources = (inputs.source, inputs.validation)
    notes = [s.note for s in sources if s.note and s.note not in described]
    own = {"augment": components.augment, "device_augment": components.device_augment}
    found = {
        "data notes": "; ".join(dict.fromkeys(notes)),
        "channels": describe_channels(inputs.source, config.data.channels),
        "augmentation": ", ".join(
            f"own {name}" for name, value in own.items() if value is not None
        ),
    }
    return {name: note for name, note in found.items() if note}


def _describe_model(config: RunConfig, model: nn.Module, components: Components) -> str:
    weights = sum(parameter.numel() for parameter in model.parameters())
    stem = config.model.stem_for(config.data.image_size)
    is_resnet = config.model.name in MODEL_NAMES and config.model.name.startswith("resnet")
    with_stem = f" with the {stem} stem" if is_resnet else ""
    frozen = count_frozen(model)
    with_frozen = f", {frozen:,} of them frozen" if frozen else ""
    if components.model is not None:
        return (
            f"{given_name(components.model)} (given in Python), {weights:,} parameters{with_frozen}"
        )
    return f"{config.model.name}{with_stem}, {weights:,} parameters{with_frozen}"


def _optional_notes(
    config: RunConfig,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    parts: StepParts,
    pretrained: list[str],
    schedule: LrSchedule,
    plan: BatchPlan,
) -> dict[str, str]:
    salvaged = ""
    if checkpoint is not None and checkpoint.salvaged_by is not None:
        salvaged = (
            f"not bit-exact: salvaged by rank {checkpoint.salvaged_by} after the loss of another rank; "
            "weights and momenta are exact, batch-norm statistics are of that rank only"
        )
    notes = {
        "warm-up": schedule.describe_cut(),
        "noise scale": _describe_noise_scale(config, plan),
        "batch schedule": describe_stages(plan.global_batch, plan.growth) if plan.growth else "",
        "average": parts.average.describe(plan.samples / plan.last_batch) if parts.average else "",
        "pretrained": "; ".join(pretrained),
        "resume": "; ".join(filter(None, (folder.note, salvaged))),
        "changed on resume": changes(checkpoint, config, LOCAL_SETTINGS) if checkpoint else "",
    }
    return {name: note for name, note in notes.items() if note}


def _describe_noise_scale(config: RunConfig, plan: BatchPlan) -> str:
    if not config.run.noise_scale:
        return ""
    parts = -(-plan.global_batch // plan.micro_batch)
    if parts < 2:
        return (
            "not available: a step is one micro-batch; use several ranks or a smaller --batch-size"
        )
    return f"estimated from {parts} micro-batches of {plan.micro_batch} per step"
