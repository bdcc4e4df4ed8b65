"""What a run starts from: data, run folder and checkpoint, agreed among all ranks.

Each is agreed before the next, so that what is missing on one node ends all ranks with the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.comm.group import Group
from paceline.config import EQUAL_SHARES, PROBED_SHARES, RunConfig
from paceline.core.errors import CheckpointError, ConfigError, DataError, PacelineError
from paceline.core.extensions import load_extension
from paceline.data import OpenedFiles, Source, open_data
from paceline.optim.settings import ANCHORED, OPTIMIZERS_OF_SVRG
from paceline.plan.fusion_plan import EIGHT_BIT
from paceline.train.batch_sizes import requested_batch, resolve_batch_sizes
from paceline.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    ForeignCheckpointError,
    read_file,
)
from paceline.train.components import Components
from paceline.train.fast_path import check_norm_group
from paceline.train.machine import versions
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, RunLock, claim_run_folder
from paceline.train.run_state import check_pinned
from paceline.train.shares import given_speeds


def check_settings(config: RunConfig, ranks: int, device: str, components: Components) -> None:
    """Raises ConfigError for settings that cannot be used together with so many ranks, this kind of
    device and the program's objects, whatever data and model are."""
    check_ranks(config, ranks)
    refuse_with_svrg(config, components, device)
    refuse_on_servers(config, components)
    if names := tracker_names(config):
        load_trackers(names).check_trackers(names)


def tracker_names(config: RunConfig) -> list[str]:
    """The trackers of a run, each once."""
    return list(dict.fromkeys(config.run.trackers))


def load_trackers(names: Sequence[str]) -> Any:
    """Returns the extension package. Raises ConfigError if it was removed."""
    return load_extension("trackers", "run.trackers", list(names))


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raises ConfigError for settings that do not fit the number of ranks."""
    resolve_batch_sizes(*requested_batch(config, ranks))
    check_norm_group(config, ranks)
    if config.run.shares not in (EQUAL_SHARES, PROBED_SHARES):
        given_speeds(config.run.shares, ranks)


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
            labels = labels_digest(source.labels)
            if config.data.shuffle == "shards":
                sizes = np.array(source.shard_sizes or (), dtype=np.int64)
                labels += f", shards {labels_digest(sizes)}"
            facts = {
                "training images": len(source),
                "training labels (digest)": labels,
                "validation images": len(validation),
                "validation labels (digest)": labels_digest(validation.labels),
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


def labels_digest(values: npt.NDArray[np.int64]) -> str:
    """By which a run recognizes its data."""
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
