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
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, RunLock, claim_run_folder
from paceline.train.run_state import check_pinned


def tracker_names(config: RunConfig) -> list[str]:
    """The trackers of a run, each once."""
    return list(dict.fromkeys(config.run.trackers))


def load_trackers(names: Sequence[str]) -> Any:
    """Returns the extension package. Raises ConfigError if it was removed."""
    return load_extension("trackers", "run.trackers", list(names))


def check_trackers(config: RunConfig) -> None:
    """Raises ConfigError for a tracker that cannot be used."""
    if names := tracker_names(config):
        load_trackers(names).check_trackers(names)


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
    """Opens the data and the run folder on this rank, together with all others."""
    claimed: tuple[RunFolder, RunLock] | None = None
    with contextlib.ExitStack() as undo:
        with group.phase("inputs"):
            source, validation = _open_data(config, components)
            if group.rank == 0:
                claimed = claim_run_folder(config, restarted=group.restarted)
                undo.enter_context(claimed[0].discarded_on_error())
                undo.enter_context(claimed[1].released_on_error())
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
        folder = _broadcast_folder(claimed[0] if claimed else None, group)
    return RunInputs(source, validation, labels, folder, claimed[1] if claimed else None)


def labels_digest(values: npt.NDArray[np.int64]) -> str:
    """By which a run recognizes its data."""
    return hashlib.sha256(values.tobytes()).hexdigest()[:12]


def common_settings(config: RunConfig) -> dict[str, object]:
    """Settings that must be equal on all ranks: all but a node's own paths and worker counts."""
    # Tracing and evaluation details use collectives: a resumed run may change them, but ranks may not
    # differ.
    collective = {"run.traced_steps", "run.eval_details"}
    own = (LOCAL_SETTINGS - collective) | {"data.dir"}
    return {name: value for name, value in config.flat().items() if name not in own}


def shared_versions() -> dict[str, str]:
    """Of the software that must be the same on all ranks."""
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
