"""Opens the inputs of a run: run folder, checkpoint and data.

All ranks check together that each of these could be opened and is equal on all ranks. A missing file
on one node thus ends all ranks with the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, DataError, PacelineError
from paceline.core.extensions import load_extension
from paceline.data import Source, open_data
from paceline.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    ForeignCheckpointError,
    read_file,
)
from paceline.train.components import Components
from paceline.train.machine import versions
from paceline.train.resolve import check_num_classes
from paceline.train.run_folder import (
    LOCAL_SETTINGS,
    RunFolder,
    RunLock,
    claim_run_folder,
    undone_on_error,
)
from paceline.train.run_state import check_pinned


def tracker_names(config: RunConfig) -> list[str]:
    """Returns the names of the trackers of a run, each once."""
    return list(dict.fromkeys(config.run.trackers))


def load_trackers(names: Sequence[str]) -> Any:
    """Imports the package that provides trackers. Raises a ConfigError if it is not installed."""
    return load_extension("trackers", "run.trackers", list(names))


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError if a tracker of the run cannot be used."""
    if names := tracker_names(config):
        load_trackers(names).check_trackers(names)


@dataclass(frozen=True)
class RunInputs:
    """The data of a run.

    Attributes:
        source: Training images.
        validation: Validation images.
        labels: Digest of the training labels, and of the shard sizes if the sample order depends on
            them. A resumed run compares this digest with the one in the checkpoint.
    """

    source: Source
    validation: Source
    labels: str


def agree_on_folder(config: RunConfig, group: Group) -> tuple[RunFolder, RunLock | None]:
    """Chooses the run folder together with all ranks. A collective.

    Args:
        config: The settings of the run.
        group: The ranks.

    Returns:
        The folder, and its lock on rank 0.

    Raises:
        PacelineError: On all ranks, if rank 0 cannot use the folder.
    """
    claimed: tuple[RunFolder, RunLock] | None = None
    with contextlib.ExitStack() as undo:
        with group.phase("folder"):
            if group.rank == 0:
                claimed = claim_run_folder(config, restarted=group.restarted)
                undo.enter_context(undone_on_error(*claimed))
        folder = _broadcast_folder(claimed[0] if claimed else None, group)
    return folder, claimed[1] if claimed else None


def agree_on_data(config: RunConfig, group: Group, components: Components) -> RunInputs:
    """Opens the data together with all ranks. A collective.

    Args:
        config: The settings of the run.
        group: The ranks.
        components: Python objects that replace objects that the settings name.

    Raises:
        PacelineError: On all ranks, if one rank cannot use the data, or if the data differs.
    """
    with group.phase("inputs"):
        source, validation = _open_data(config, components)
    with group.phase("data set") as same:
        labels = labels_digest(source.labels)
        if config.data.shuffle_window:
            sizes = np.array(source.shard_sizes or (), dtype=np.int64)
            labels += f", shards {labels_digest(sizes)}"
        facts = {
            "training images": len(source),
            "training labels (digest)": labels,
            "validation images": len(validation),
            "validation labels (digest)": labels_digest(validation.labels),
        }
        same.compare(facts, "use the same data")
    return RunInputs(source, validation, labels)


def labels_digest(values: npt.NDArray[np.int64]) -> str:
    """Returns a digest of labels. A resumed run compares digests to check that its data is unchanged."""
    return hashlib.sha256(values.tobytes()).hexdigest()[:12]


def common_settings(config: RunConfig) -> dict[str, object]:
    """Returns the settings that must be equal on all ranks: all except local ones such as paths."""
    # Tracing and evaluation details use collectives. A resumed run may change them, but they must be
    # equal on all ranks.
    collective = {"run.traced_steps", "run.eval_details"}
    local = (LOCAL_SETTINGS - collective) | {"data.dir"}
    return {name: value for name, value in config.flat().items() if name not in local}


def shared_versions() -> dict[str, str]:
    """Returns the versions of the packages that must have the same version on all ranks."""
    return {name: version for name, version in versions().items() if name != "cuda"}


def _open_data(config: RunConfig, components: Components) -> tuple[Source, Source]:
    source, validation = open_data(config.data, components.train_data, components.val_data)
    if list(source.classes) != list(validation.classes):
        raise DataError(
            f"training has {len(source.classes)} classes, validation {len(validation.classes)}, "
            "or their names differ",
            "give both splits the same class folders, or one classes.json",
        )
    check_num_classes(config, len(source.classes))
    return source, validation


def _broadcast_folder(folder: RunFolder | None, group: Group) -> RunFolder:
    """Returns the folder that rank 0 has chosen and locked."""
    chosen = f"{folder.path}\n{folder.resume_from or ''}".encode() if folder else None
    path, _, resume = group.broadcast_bytes(chosen).decode().partition("\n")
    return folder or RunFolder(Path(path), Path(resume) if resume else None)


def read_checkpoint(
    config: RunConfig, folder: RunFolder, group: Group
) -> tuple[Checkpoint | None, RunFolder]:
    """Reads the checkpoint of a resumed run. All ranks call this.

    Rank 0 reads the file and broadcasts the content, so that only the node of rank 0 needs the file.
    `--resume auto` skips damaged checkpoints and uses the newest intact one.

    Args:
        config: The settings of the run.
        folder: The run folder.
        group: The ranks.

    Returns:
        The checkpoint, or None for a new run; and the folder, whose `resume_from` is the file in use.

    Raises:
        CheckpointError: If no checkpoint can be used.
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
        parsed = Checkpoint.from_bytes(sent, path)
        # Settings that the scaling rule or the recipe chooses are not known yet.
        if not config.optim.follows_rule and config.run.pending is None:
            check_pinned(parsed, config, path)
        return parsed

    checkpoint = group.agree_on("checkpoint content", parse)
    return checkpoint, replace(folder, resume_from=path)


def _newest_intact(folder: RunFolder) -> tuple[RunFolder, bytes]:
    """Reads the newest undamaged checkpoint among `folder.resume_from` and `folder.older`.

    Renames nothing, because a resume that is refused later must leave the run unchanged.

    Returns:
        The folder, with a note on damaged files, and the bytes of the checkpoint.
    """
    assert folder.resume_from is not None
    damaged: list[Path] = []
    first: CheckpointError | None = None
    for path in (folder.resume_from, *folder.older):
        try:
            content = read_file(path)
            if folder.older:
                Checkpoint.from_bytes(content, path)
        except (DamagedCheckpointError, ForeignCheckpointError) as error:
            # A foreign file under the name of this run's checkpoint is treated as damaged.
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
