"""What a run starts from: batch sizes, data, run folder and checkpoint, agreed among all ranks.

Each is agreed before the next, so that what is missing on one node ends all ranks with the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.comm.group import Group
from paceline.config import EQUAL_SHARES, RunConfig
from paceline.core.errors import CheckpointError, ConfigError, DataError, PacelineError
from paceline.core.settings import flatten
from paceline.data import OpenedFiles, Source, open_data
from paceline.optim.batch_growth import BatchGrowth, Stages
from paceline.optim.scaling import Recipe, Target, scale_recipe
from paceline.optim.settings import ANCHORED, OPTIMIZERS_OF_SVRG, OptimSettings
from paceline.plan.fusion_plan import EIGHT_BIT
from paceline.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    ForeignCheckpointError,
    read_file,
)
from paceline.train.components import Components
from paceline.train.machine import versions
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, RunLock, claim_run_folder
from paceline.train.run_state import check_pinned

# Without `--batch-size`, the largest micro-batch of a process.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256
# With a batch that nobody has chosen.
_LEAST_STEPS_PER_EPOCH = 8
_LEAST_AUTOMATIC_BATCH = 16
# Evaluation keeps no activations, so its batches may be larger than those of training.
_EVAL_BATCH, _EVAL_TIMES = 256, 4


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch · ranks · accumulation`, always exactly."""

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        chosen = ", chosen automatically" if self.automatic else ""
        return (
            f"{self.global_batch} = {self.micro_batch} a process × {world_size} rank(s) × "
            f"{self.accumulation} micro-step(s){chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int, samples: int | None = None
) -> BatchSizes:
    """Without a global batch it is the micro-batch times the number of ranks; without both it is 256, or
    less, down to 16, where an epoch of `samples` would have fewer than eight steps. Raises ConfigError,
    with the nearest valid values, if the global batch is not divisible."""
    if micro_batch is None and global_batch is None and samples is not None:
        most = max(_LEAST_AUTOMATIC_BATCH, samples // _LEAST_STEPS_PER_EPOCH)
        if most < DEFAULT_GLOBAL_BATCH:
            share = max(1, min(most, samples) // world_size)
            return _automatic((1 << share.bit_length() - 1) * world_size, world_size)
    if micro_batch is None:
        return _automatic(global_batch or DEFAULT_GLOBAL_BATCH, world_size)
    if global_batch is None:
        return BatchSizes(micro_batch * world_size, micro_batch, 1, False)
    unit = micro_batch * world_size
    if global_batch % unit:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"is not a multiple of {unit} = {micro_batch} (batch size) × {world_size} (ranks)",
            f"use {_multiples(global_batch, unit)}, or --batch-size "
            + _nearest_divisor(global_batch, world_size, micro_batch),
        )
    return BatchSizes(global_batch, micro_batch, global_batch // unit, False)


def eval_batch(micro_batch: int) -> int:
    """Images of one batch of an evaluation."""
    return min(_EVAL_BATCH, _EVAL_TIMES * micro_batch)


def requested_batch(config: RunConfig, ranks: int) -> tuple[int | None, int | None, int]:
    """What `resolve_batch_sizes` checks before the data is open: `optim.scaling` chooses the micro-batch
    unless the user gave it."""
    chosen = config.optim.scaling == "auto" and "run.batch_size" not in config.optim.scaling_keeps
    first = config.optim.batch_growth.first_batch(config.run.global_batch_size)
    return first, None if chosen else config.run.batch_size, ranks


def apply_scaling(
    config: RunConfig, samples: int, ranks: int, *, own_optimizer: bool = False,
    resumed: Checkpoint | None = None,
) -> tuple[RunConfig, str]:  # fmt: skip
    """The configuration with the choices of `optim.scaling`, which is then off so that `config.toml`
    repeats the run, and their description; unchanged where it is off. `own_optimizer`: an object of the
    program replaces the one that the settings name. A `resumed` run keeps its first batch."""
    optim = config.optim
    if optim.scaling == "off":
        return config, ""
    if own_optimizer:
        raise ConfigError(
            "optim.scaling", "auto", "the rule does not know an optimizer given in Python",
            "name one of lars, muon, sgd, adamw and lamb, or use 'off'",
        )  # fmt: skip
    known = optim.known_good_batch
    if known is None:
        raise ConfigError(
            "optim.known_good_batch", None,
            "is not known: optim.scaling = 'auto' needs the batch at which the recipe works",
            "set it, or run.global_batch_size in the recipe",
        )  # fmt: skip
    sizes = resolve_batch_sizes(*requested_batch(config, ranks), samples=samples)
    recipe = Recipe(
        optim, known, optim.known_good_optimizer or optim.name, config.run.batch_size,
        config.run.average_epochs, kept=frozenset(optim.scaling_keeps),
        mixing=tuple(f"run.{name}" for name in ("mixup", "cutmix") if getattr(config.run, name)),
        # Averages are refused where ranks have weights of their own.
        averages=config.comm.mode == "synchronous" and config.comm.hook != "post_local_sgd",
        one_batch=_why_one_batch(config),
    )  # fmt: skip
    target = Target(sizes.global_batch, samples, config.run.epochs, ranks)
    if resumed is not None and resumed.sampler["global_batch"] <= target.batch:
        stages = BatchGrowth.parse(flatten(resumed.config).get("optim.batch_schedule", "")).stages
        target = replace(
            target, first_batch=int(resumed.sampler["global_batch"]),
            grows_at=stages[0][0] if stages else None,
        )  # fmt: skip
    scaling = scale_recipe(recipe, target)
    values = {"run.global_batch_size": sizes.global_batch, **scaling.values}
    # The result is a recipe of its own, known for its own batch.
    applied: dict[str, object] = {
        "optim.scaling": "off", "optim.known_good_batch": None, "optim.known_good_optimizer": "",
        "optim.known_good_lr": None, "optim.known_good_momentum": None, "optim.scaling_keeps": [],
    }  # fmt: skip
    return config.with_values(values | applied), scaling.describe()


def _why_one_batch(config: RunConfig) -> str:
    if config.rehearse.ranks:
        return (
            "a rehearsal has one; the cluster's run has one with --set optim.batch_schedule='' only"
        )
    if config.run.shares != EQUAL_SHARES:
        return "run.shares divides a constant one"
    return "comm.mode = 'asynchronous' has one" if config.comm.mode != "synchronous" else ""


def batch_stages(settings: OptimSettings, sizes: BatchSizes, world_size: int) -> Stages:
    """The (epoch, global batch) that `optim.batch_schedule` adds to the first batch."""
    unit = sizes.micro_batch * world_size
    epochs, limit = settings.decay_epochs, settings.batch_limit
    return settings.batch_growth.after(sizes.global_batch, unit, epochs, limit)


def refuse_on_servers(config: RunConfig, components: Components) -> None:
    """Raises ConfigError for an optimizer of the program that parameter servers would have to run."""
    if config.comm.mode == "asynchronous" and components.optimizer is not None:
        raise ConfigError(
            "optimizer", None, "but comm.mode = 'asynchronous' cannot send the state of an optimizer "
            "given in Python", "name one in optim.name, as in 'sgd'",
        )  # fmt: skip


def refuse_with_svrg(config: RunConfig, components: Components, device: str) -> None:
    """Raises ConfigError for settings that contradict SVRG and its relatives: fixed-point weights are
    no half-precision weights, and a full gradient is that of a fixed function of the samples."""
    name = config.optim.name
    if name not in OPTIMIZERS_OF_SVRG:
        return
    if config.precision.amp_dtype not in ("fp32", *(["auto"] if device == "cpu" else [])):
        raise ConfigError(
            "precision.amp_dtype", config.precision.amp_dtype, f"{name} computes in fp32",
            "use --amp-dtype fp32",
        )  # fmt: skip
    if name not in ANCHORED:
        return
    reason = f"{name} needs the same gradient of a sample in every pass"
    data = config.data
    for field, value, fixed in (
        ("data.augment", data.augment, "none"),
        ("data.flip", data.flip, False),
        ("data.cutout", data.cutout, 0),
        ("data.color_jitter", data.color_jitter, (0.0, 0.0, 0.0, 0.0)),
        ("run.mixup", config.run.mixup, 0.0),
        ("run.cutmix", config.run.cutmix, 0.0),
        # It would measure the noise of differences.
        ("run.noise_scale", config.run.noise_scale, False),
    ):
        if value != fixed:
            shown = str(fixed).lower() if isinstance(fixed, bool) else fixed
            raise ConfigError(field, value, reason, f"use {field}={shown}")
    if data.randaugment[0]:
        raise ConfigError("data.randaugment", data.randaugment, reason, "use [0, 9]")
    for own in ("augment", "device_augment"):
        if getattr(components, own) is not None:
            raise ConfigError(
                own, None, f"{reason}; an own augmentation may be random", "leave it out"
            )
    if config.comm.wire in EIGHT_BIT:
        raise ConfigError(
            "comm.wire", config.comm.wire, f"{name} exchanges differences and full gradients, between "
            "which error feedback would mix", "use 'auto'",
        )  # fmt: skip
    if config.comm.wire == "float16":
        raise ConfigError(
            "comm.wire", "float16", f"{name} exchanges a full gradient now and then: where it overflows, "
            "all steps up to the next one are lost", "use 'auto' or 'bfloat16'",
        )  # fmt: skip
    if config.run.shares != EQUAL_SHARES:
        raise ConfigError(
            "run.shares", config.run.shares, f"the full gradient of {name} is divided equally",
            f"use {EQUAL_SHARES!r}",
        )  # fmt: skip
    if config.model.norm_group > 1:
        raise ConfigError(
            "model.norm_group", config.model.norm_group, f"{name} has passes that ranks do not make "
            "together", "use 1",
        )  # fmt: skip


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """As few micro-steps as the largest automatic micro-batch allows."""
    if global_batch % world_size:
        raise ConfigError(
            "run.global_batch_size",
            global_batch,
            f"cannot be divided among {world_size} ranks",
            f"use {_multiples(global_batch, world_size)}",
        )
    share = global_batch // world_size
    accumulation = -(-share // LARGEST_AUTOMATIC_MICRO_BATCH)
    while share % accumulation:
        accumulation += 1
    return BatchSizes(global_batch, share // accumulation, accumulation, True)


def _multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, (value // unit + 1) * unit
    return f"{below} or {above}" if below else str(above)


def _nearest_divisor(global_batch: int, world_size: int, wanted: int) -> str:
    """The valid micro-batches closest to the wanted one."""
    if global_batch % world_size:
        return f"with a number of ranks that divides {global_batch}"
    share = global_batch // world_size
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))


@dataclass(frozen=True)
class RunInputs:
    """`labels` is a digest of the training labels, and of the shard sizes where the sample order
    depends on them, by which a resumed run recognizes its data. Only rank 0 holds a `lock`."""

    source: Source
    validation: Source
    labels: str
    folder: RunFolder
    lock: RunLock | None

    @contextlib.contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """An error inside the context releases the lock and removes an empty folder."""
        with self.folder.discarded_on_error(), _released_on_error(self.lock):
            yield


def agree_on_inputs(config: RunConfig, group: Group, components: Components) -> RunInputs:
    """Opens the data and the run folder on this rank, together with all others. The first rank of each
    host opens the data, and the others use what it found out about the files (`OpenedFiles`)."""
    found: tuple[Source, Source] | None = None
    claimed: tuple[RunFolder, RunLock] | None = None
    with contextlib.ExitStack() as undo:
        with group.phase("inputs"):
            if group.rank == group.host_leader or not _is_on_disk(config, components):
                opened = OpenedFiles(config.data)
                found = _open_data(config, components, opened)
                _share(opened, group, undo)
            if group.rank == 0:
                claimed = claim_run_folder(config, restarted=group.restarted)
                undo.enter_context(claimed[0].discarded_on_error())
                undo.enter_context(claimed[1].released_on_error())
        with group.phase("data set") as same:
            if found is None:
                found = _open_data(config, components, _shared_files(config, group))
            source, validation = found
            labels = _digest(source.labels)
            if config.data.shuffle == "shards":
                sizes = np.array(source.shard_sizes or (), dtype=np.int64)
                labels += f", shards {_digest(sizes)}"
            facts = {
                "training images": len(source),
                "training labels (digest)": labels,
                "validation images": len(validation),
                "validation labels (digest)": _digest(validation.labels),
            }
            same.compare(facts, "use the same data")
        folder = _broadcast_folder(claimed[0] if claimed else None, group)
    return RunInputs(source, validation, labels, folder, claimed[1] if claimed else None)


def _is_on_disk(config: RunConfig, components: Components) -> bool:
    given = components.train_data is not None
    return not given and config.data.source not in ("synthetic", "embedded")


def _share(opened: OpenedFiles, group: Group, undo: contextlib.ExitStack) -> None:
    """Lets the other ranks of this host know what this one has found; removed after the next phase."""
    leads = group.shares_host and group.rank == group.host_leader
    path = opened.write() if leads else None
    if path is not None:
        undo.callback(path.unlink, missing_ok=True)
        group.post_to_host("data", str(path))


def _shared_files(config: RunConfig, group: Group) -> OpenedFiles | None:
    """What the first rank of this host has found; None where that cannot be used: this rank then opens
    the data itself."""
    path = group.read_of_host("data")
    return OpenedFiles.read(Path(path), config.data) if path else None


def _digest(values: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:12]


def common_settings(config: RunConfig) -> dict[str, object]:
    """Settings that must be equal on all ranks: all but a node's own paths and worker counts."""
    # Tracing and evaluation details use collectives: a resumed run may change them, but ranks may not
    # differ.
    collective = {"run.trace", "run.trace_steps", "run.eval_details"}
    own = (LOCAL_SETTINGS - collective) | {"data.dir"}
    return {name: value for name, value in config.flat().items() if name not in own}


def shared_versions() -> dict[str, str]:
    """Of the software that must be the same on all ranks."""
    return {name: version for name, version in versions().items() if name != "cuda"}


def _open_data(
    config: RunConfig, components: Components, opened: OpenedFiles | None
) -> tuple[Source, Source]:
    given = components.train_data, components.val_data
    source, validation = open_data(config.data, *given, opened=opened)
    if list(source.classes) != list(validation.classes):
        raise DataError(
            f"training has {len(source.classes)} classes, validation {len(validation.classes)}, "
            "or their names differ",
            "give both splits the same class folders, or one classes.json",
        )
    check_num_classes(config, len(source.classes))
    return source, validation


def check_num_classes(config: RunConfig, classes: int) -> None:
    """Raises ConfigError if the model would have fewer outputs than the data has `classes`."""
    declared = config.model.num_classes
    if declared is not None and declared < classes:
        raise ConfigError(
            "model.num_classes", declared, f"but the data has {classes} classes",
            "raise it, or leave it out to take the data's",
        )  # fmt: skip


def _broadcast_folder(folder: RunFolder | None, group: Group) -> RunFolder:
    """The one that rank 0 has chosen and locked."""
    chosen = f"{folder.path}\n{folder.resume_from or ''}".encode() if folder else None
    path, _, resume = group.broadcast_bytes(chosen).decode().partition("\n")
    return folder or RunFolder(Path(path), Path(resume) if resume else None)


def _released_on_error(lock: RunLock | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if lock is None else lock.released_on_error()


def read_checkpoint(
    config: RunConfig, folder: RunFolder, group: Group
) -> tuple[Checkpoint | None, RunFolder]:
    """The checkpoint to start from, and the folder with the file that was used.

    Rank 0 reads the file and broadcasts its bytes, so that only its node needs it. `--resume auto`
    skips damaged checkpoints and uses the newest intact one.
    """
    if folder.resume_from is None:
        return None, folder
    content, error = None, None
    if group.rank == 0:
        try:
            folder, content = _newest_intact(folder)
        except PacelineError as caught:
            error = caught
    group.agree("checkpoint", error)
    chosen = group.broadcast_bytes(
        str(folder.resume_from).encode() if content is not None else None
    )
    sent, path = group.broadcast_bytes(content), Path(chosen.decode())

    def parse() -> Checkpoint:
        found = Checkpoint.from_bytes(sent, path)
        if config.optim.scaling == "off":  # else the settings are not known yet
            check_pinned(found, config, path)
        if found.salvaged_by is not None and not config.checkpoint.accept_salvaged:
            raise CheckpointError(
                f"{path} was salvaged by rank {found.salvaged_by} and is not bit-exact",
                "resume from a regular one, or use checkpoint.accept_salvaged=true",
            )
        return found

    checkpoint = group.agree_on("checkpoint content", parse)
    return checkpoint, replace(folder, resume_from=path)


def _newest_intact(folder: RunFolder) -> tuple[RunFolder, bytes]:
    """The bytes of the first intact file of `resume_from` and `older`, and the folder with a note on
    damaged ones. Nothing is renamed yet: a resume that is refused later must leave the run
    unchanged."""
    assert folder.resume_from is not None
    damaged: list[Path] = []
    first: CheckpointError | None = None
    for path in (folder.resume_from, *folder.older):
        try:
            content = read_file(path)
            if folder.older:
                Checkpoint.from_bytes(content, path)
        except (DamagedCheckpointError, ForeignCheckpointError) as error:
            # A foreign file under the name of this run's checkpoint counts as damaged.
            first = first or error
            damaged.append(path)
            continue
        if not damaged:
            return folder, content
        names = ", ".join(bad.name for bad in damaged)
        skipped = f"{names} is damaged and renamed to *.damaged; resuming from {path.name}"
        note = "; ".join(filter(None, (folder.note, skipped)))
        return replace(folder, resume_from=path, note=note, damaged=tuple(damaged)), content
    assert first is not None
    if len(damaged) > 1:
        names = ", ".join(bad.name for bad in damaged)
        raise DamagedCheckpointError(
            f"no intact checkpoint in {folder.checkpoints}: {names} are damaged",
            "restore one, or start again with another --output",
        )
    raise first
