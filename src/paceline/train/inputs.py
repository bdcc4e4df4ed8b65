"""`RunInputs`: what a run reads, agreed upon by all ranks.

In: a configuration and the group. Out: data and folder, and the checkpoint to start from. Each is settled
among all ranks before the next: what is missing on one node alone ends all ranks with the same line.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.comm.group import Group
from paceline.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, DataError, PacelineError
from paceline.data.sources.source import Source, open_source
from paceline.data.sources.source_protocol import shard_sizes
from paceline.train.checkpoint import (
    Checkpoint,
    DamagedCheckpointError,
    ForeignCheckpointError,
    read_file,
)
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
    group.agree("configuration", facts=_common_facts(config))
    source, validation = group.agree_on("data", lambda: _open_data(config))
    labels = _digest(source)
    if config.data.shuffle == "shards":
        labels += f", shards {_shards_digest(source)}"
    facts = {
        "training images": len(source),
        "training labels (digest)": labels,
        "validation images": len(validation),
        "validation labels (digest)": _digest(validation),
    }
    group.agree("data set", facts=facts, remedy="use the same data")
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
        group.agree("run folder", error)
        told = f"{folder.path}\n{folder.resume_from or ''}".encode() if folder else None
        path, _, resume = group.broadcast_bytes(told).decode().partition("\n")
    if folder is not None:
        return folder, lock
    return RunFolder(Path(path), Path(resume) if resume else None), None


def _released_on_error(lock: RunLock | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if lock is None else lock.released_on_error()


def read_checkpoint(
    config: RunConfig, folder: RunFolder, group: Group
) -> tuple[Checkpoint | None, RunFolder]:
    """The checkpoint to start from, and the folder with what was found out about it.

    Rank 0 reads and sends the bytes, so that only its node needs the file. Where `--resume auto` meets a
    damaged one it goes back to the newest sound one.
    """
    if folder.resume_from is None:
        return None, folder
    content, error = None, None
    if group.rank == 0:
        try:
            folder, content = _newest_sound(folder)
        except PacelineError as caught:
            error = caught
    group.agree("checkpoint", error)
    chosen = group.broadcast_bytes(
        str(folder.resume_from).encode() if content is not None else None
    )
    sent, path = group.broadcast_bytes(content), Path(chosen.decode())

    def parse() -> Checkpoint:
        found = Checkpoint.from_bytes(sent, path)
        check_pinned(found, config, path)
        if found.salvaged_by is not None and not config.checkpoint.accept_salvaged:
            raise CheckpointError(
                f"{path} was salvaged by rank {found.salvaged_by} and is not bit-exact",
                "resume from a regular one, or use checkpoint.accept_salvaged=true",
            )
        return found

    checkpoint = group.agree_on("checkpoint content", parse)
    return checkpoint, replace(folder, resume_from=path)


def _newest_sound(folder: RunFolder) -> tuple[RunFolder, bytes]:
    """The first of `resume_from` and `older` that is whole, with its bytes; a note of those that are not.

    Nothing is renamed yet: a resume that is refused later leaves the run as it was.
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
            # Under the name of a checkpoint of this run, what reads as foreign is damaged.
            first = first or error
            damaged.append(path)
            continue
        if not damaged:
            return folder, content
        names = ", ".join(bad.name for bad in damaged)
        told = f"{names} is damaged and kept aside as *.damaged; going back to {path.name}"
        note = "; ".join(filter(None, (folder.note, told)))
        return replace(folder, resume_from=path, note=note, damaged=tuple(damaged)), content
    assert first is not None
    if len(damaged) > 1:
        names = ", ".join(bad.name for bad in damaged)
        raise DamagedCheckpointError(
            f"no sound checkpoint in {folder.checkpoints}: {names} are damaged",
            "restore one, or start anew with another --output",
        )
    raise first


# Batch sizes: the global batch, the micro-batch of one process, and the accumulation between
# them.
#
# In: what recipe and flags say, and the number of ranks. Out: three whole numbers with global =
# micro · ranks · accumulation, or an error that names the nearest values that would do.


# Without `-b` a process takes its share of the global batch in pieces of at most this many samples.
LARGEST_AUTOMATIC_MICRO_BATCH = 256
DEFAULT_GLOBAL_BATCH = 256


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch · ranks · accumulation`, always exactly."""

    global_batch: int
    micro_batch: int
    accumulation: int
    automatic: bool

    def describe(self, world_size: int) -> str:
        """For the record: how the global batch is made up, and whether we chose it so."""
        chosen = ", chosen automatically" if self.automatic else ""
        return (
            f"{self.global_batch} = {self.micro_batch} a process × {world_size} rank(s) × "
            f"{self.accumulation} micro-step(s){chosen}"
        )


def resolve_batch_sizes(
    global_batch: int | None, micro_batch: int | None, world_size: int
) -> BatchSizes:
    """With a micro-batch alone the global batch is micro · ranks; a global batch stays as it is."""
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


def _automatic(global_batch: int, world_size: int) -> BatchSizes:
    """The fewest micro-steps whose micro-batch is not too large."""
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
    """Micro-batches next to the wanted one with which this global batch would do."""
    if global_batch % world_size:
        return f"with a number of ranks that divides {global_batch}"
    share = global_batch // world_size
    divisors = [d for d in range(1, share + 1) if share % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
    return " or ".join(str(d) for d in sorted(near))
