"""`RunInputs`: what a run reads, agreed upon by all ranks.

In: a configuration and the group. Out: data and folder, and the checkpoint to start from. Each is settled
among all ranks before the next: what is missing on one node alone ends all ranks with the same line.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import ConfigError, DataError, PacelineError
from paceline.data.sources.source import Source, open_source
from paceline.data.sources.source_protocol import shard_sizes
from paceline.train.checkpoint import Checkpoint, read_file
from paceline.train.machine import versions
from paceline.train.run_folder import LOCAL_SETTINGS, RunFolder, claim_run_folder
from paceline.train.run_lock import RunLock
from paceline.train.run_state import check_pinned


@dataclass(frozen=True)
class RunInputs:
    """`labels` is a digest of the training labels, by which a checkpoint knows its data again; where
    the order depends on the sizes of the shards, of these too. `lock` is rank 0's."""

    source: Source
    validation: Source
    labels: str
    folder: RunFolder
    lock: RunLock | None

    @contextlib.contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """A start that fails within this context leaves neither a lock nor an empty folder."""
        with self.folder.discarded_on_error(), _released_on_error(self.lock):
            yield


def agree_on_inputs(config: RunConfig, group: Group) -> RunInputs:
    """Opens and reads on this rank, in step with all others."""
    group.settle("configuration", facts=_common_facts(config))
    source, validation = group.settled("data", lambda: _open_data(config))
    labels = _digest(source)
    if config.data.shuffle == "shards":
        labels += f", shards {_shards_digest(source)}"
    facts = {
        "training images": len(source),
        "training labels (digest)": labels,
        "validation images": len(validation),
        "validation labels (digest)": _digest(validation),
    }
    group.settle("data set", facts=facts, remedy="use the same data")
    return RunInputs(source, validation, labels, *_agree_on_folder(config, group))


def _digest(source: Source) -> str:
    return hashlib.sha256(source.labels.tobytes()).hexdigest()[:12]


def _shards_digest(source: Source) -> str:
    sizes = np.array(shard_sizes(source) or (), dtype=np.int64)
    return hashlib.sha256(sizes.tobytes()).hexdigest()[:12]


def common_settings(config: RunConfig) -> dict[str, object]:
    """Those that are equal on all ranks: all but a node's own paths and worker counts."""
    # Tracing takes collectives: a continuation may differ in it, ranks may not.
    own = (LOCAL_SETTINGS - {"run.trace", "run.trace_steps"}) | {"data.dir"}
    return {name: value for name, value in config.flat().items() if name not in own}


def _common_facts(config: RunConfig) -> dict[str, object]:
    """What all ranks compare before anything else."""
    facts = common_settings(config)
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


def _agree_on_folder(config: RunConfig, group: Group) -> tuple[RunFolder, RunLock | None]:
    """Rank 0 chooses and locks; the others are told."""
    folder: RunFolder | None = None
    lock: RunLock | None = None
    error: PacelineError | None = None
    if group.rank == 0:
        try:
            folder, lock = claim_run_folder(config, restarted=group.restarted)
        except PacelineError as caught:
            error = caught
    with _released_on_error(lock):
        group.settle("run folder", error)
        told = f"{folder.path}\n{folder.resume_from or ''}".encode() if folder else None
        path, _, resume = group.broadcast_bytes(told).decode().partition("\n")
    if folder is not None:
        return folder, lock
    return RunFolder(Path(path), Path(resume) if resume else None), None


def _released_on_error(lock: RunLock | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if lock is None else lock.released_on_error()


def read_checkpoint(config: RunConfig, folder: RunFolder, group: Group) -> Checkpoint | None:
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

    return group.settled("checkpoint content", parse)
