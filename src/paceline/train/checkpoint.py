"""`Checkpoint`, the state of a run after a step, and `CheckpointStore`, the checkpoints of a run folder.

A checkpoint is one file, written atomically and readable with `torch.load(weights_only=True)`. It
contains the batch-norm statistics of every rank, and a SHA-256 of the content, because torch does not
detect damaged tensor values.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.files import LEFTOVERS, part_path, read_regular, sync_directory, whole_file
from paceline.core.untrusted import is_count
from paceline.models import TensorFileError, load_tensors
from paceline.version import __version__

FORMAT = "paceline-checkpoint"
VERSION = 6
_FOREIGN = "load weights of other programs with --pretrained FILE"
_OLDER = "use an older checkpoint (in training with --resume FILE)"
_TYPES: dict[str, type] = {"world_size": int, "threads": int, "classes": list}
_NAME = re.compile(r"step-(\d+)\.pt")
_SALVAGED_NAME = re.compile(r"step-(\d+)\.salvaged\.pt")


class DamagedCheckpointError(CheckpointError):
    """Raised if the content of a checkpoint does not match its SHA-256."""


class ForeignCheckpointError(CheckpointError):
    """Raised if a file is not a Paceline checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """All state that a bit-identical resume needs.

    Schedule, data order and random numbers are pure functions of configuration and step. `sampler`,
    `schedule` and `rng` describe them for people who inspect a file; a resume checks `sampler`.

    Attributes:
        average: State of `WeightAverage`; empty if weights are not averaged.
        callbacks: State of the user's callbacks on rank 0.
        exchange: State of each rank's gradient exchange, such as the residuals of a compressing wire
            format (error feedback); usually empty.
        strategy: State of the training strategy (`run.strategy`), under the strategy's name.
    """

    progress: dict[str, Any]
    config: dict[str, Any]
    world_size: int
    threads: int
    plan: dict[str, Any]
    model: dict[str, Tensor]
    batch_norm: dict[str, Any]
    optimizer: dict[str, Any]
    precision: dict[str, float]
    sampler: dict[str, Any]
    schedule: dict[str, Any]
    rng: dict[str, Any]
    classes: list[str]
    versions: dict[str, str]
    average: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    exchange: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return int(self.progress["step"])

    @property
    def salvaged_by(self) -> int | None:
        """The rank that saved this checkpoint alone, after a rank was lost; None if all ranks saved.

        Such a salvaged checkpoint contains only the batch-norm statistics of the rank that wrote it.
        """
        rank = self.batch_norm.get("only_rank")
        return None if rank is None else int(rank)

    def with_tensors(self, change: Callable[[Tensor, tuple[Any, ...]], Tensor]) -> Checkpoint:
        """Returns a copy of the checkpoint in which `change` has replaced each tensor.

        Args:
            change: Returns the replacement of a tensor, given the tensor and the keys that lead to it.
        """
        names = self.__dataclass_fields__
        parts = {name: _changed(getattr(self, name), change, (name,)) for name in names}
        return Checkpoint(**parts)

    def on_host(self) -> Checkpoint:
        """Returns the checkpoint with all tensors in host memory. CPU tensors are not copied."""
        return self.with_tensors(lambda value, _: value.detach().cpu())

    def to_bytes(self) -> memoryview:
        """Serializes the checkpoint."""
        buffer = io.BytesIO()
        whole = self.with_tensors(lambda value, _: _not_expanded(value))
        table = {name: getattr(whole, name) for name in self.__dataclass_fields__}
        head = {"format": FORMAT, "version": VERSION, "sha256": content_hash(table)}
        torch.save({**head, **table}, buffer)
        return buffer.getbuffer()

    def write(self, path: Path) -> None:
        """Writes the file atomically."""
        # Without `parents`, because a deleted run folder must not be created again.
        write_atomically(path, self.to_bytes(), parents=False)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Reads a checkpoint from a file; raises the same errors as `from_bytes`."""
        return cls.from_bytes(read_file(path), path)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> Checkpoint:
        """Parses the content of a file.

        Args:
            content: The bytes of the file.
            path: The file, for messages.

        Raises:
            DamagedCheckpointError: If the content does not match its SHA-256.
            ForeignCheckpointError: If the file is not a Paceline checkpoint.
            CheckpointError: If this version cannot read the file's format, or values have wrong types.
        """
        try:
            table = load_tensors(io.BytesIO(content))
            table = table if isinstance(table, dict) else {}
            ours = bool(table.get("format") == FORMAT)
            parts = {name: table[name] for name in cls.__dataclass_fields__ if name in table}
            complete = len(parts) == len(cls.__dataclass_fields__)
            intact = ours and bool(table.get("sha256") == content_hash(parts))
        except Exception as error:  # noqa: BLE001  (unpickling damaged bytes can raise anything)
            raise _unreadable(path, content, error) from None
        if not ours:
            raise ForeignCheckpointError(f"{path} is not a Paceline checkpoint", _FOREIGN)
        version = table.get("version")
        if version != VERSION and not (intact and complete):
            raise CheckpointError(
                f"{path} has format {version}; Paceline {__version__} reads {VERSION}",
                "use the Paceline version that wrote it",
            )
        # A different format would have different parts. If all parts of this format are intact, only the
        # version number is damaged.
        if not intact or version != VERSION:
            raise DamagedCheckpointError(
                f"{path} is damaged: its content does not match its SHA-256", _OLDER
            )
        _check_types(parts, path)
        return cls(**parts)


def _changed(
    value: Any, change: Callable[[Tensor, tuple[Any, ...]], Tensor], where: tuple[Any, ...]
) -> Any:
    if isinstance(value, Tensor):
        return change(value, where)
    if isinstance(value, dict):
        return {key: _changed(item, change, (*where, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        made = (_changed(item, change, (*where, n)) for n, item in enumerate(value))
        return list(made) if isinstance(value, list) else tuple(made)
    return value


def _not_expanded(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy if it is larger than its storage, which `load_tensors` refuses."""
    return tensor if tensor.nbytes <= tensor.untyped_storage().nbytes() else tensor.contiguous()


def _check_types(parts: dict[str, Any], path: Path) -> None:
    """Checks the types of all entries, as another program can write a file with a correct SHA-256."""
    step = parts["progress"].get("step") if isinstance(parts.get("progress"), dict) else None
    wrong = [
        name
        for name in Checkpoint.__dataclass_fields__
        if type(parts.get(name)) is not _TYPES.get(name, dict)
    ]
    if wrong or not is_count(step):
        what = wrong[0] if wrong else "progress.step"
        raise CheckpointError(f"{path} is invalid: {what} is missing or has the wrong type", _OLDER)


def content_hash(value: Any) -> str:
    """Returns the SHA-256 of all names, plain values and tensor bytes in a nested value, in order."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
        flat = value.detach().cpu().contiguous().view(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, dict):
        digest.update(f"table {len(value)}:".encode())
        for key, item in value.items():
            digest.update(f"{key!r}=".encode())
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{value!r};".encode())


def read_file(path: Path) -> bytes:
    """Reads the bytes of a checkpoint; raises a CheckpointError if that fails."""
    try:
        return read_regular(path, most_bytes=None)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}", "check the path") from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{path} is damaged: {error.strerror}", _OLDER) from None
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from None


def _unreadable(path: Path, content: bytes, error: Exception) -> CheckpointError:
    """Returns the error for a file that torch cannot load.

    It replaces torch's own message, which is long and advises the user to trust the file.
    """
    foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if foreign:
        cause = f"{path} is not a Paceline checkpoint: it contains objects of {foreign[1]}"
        return ForeignCheckpointError(cause, _FOREIGN)
    reason = "it is truncated or damaged" if content else "it is empty"
    if isinstance(error, TensorFileError):
        reason = str(error)
    return DamagedCheckpointError(f"{path} is damaged or not a checkpoint: {reason}", _OLDER)


class CheckpointStore:
    """The folder `RUN/checkpoints`: the last `keep` checkpoints (`step-00001200.pt`) and `best.pt`.

    A file is removed only after a newer file is in place. After another rank is lost, a rank saves its
    own state as `step-00001207.salvaged.pt`. A resume uses such a salvaged checkpoint only if no
    regular checkpoint is as new.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def path(self, step: int) -> Path:
        """Returns the path of the regular checkpoint of `step`."""
        return self.folder / f"step-{step:08d}.pt"

    @property
    def best(self) -> Path:
        """Path of the best checkpoint."""
        return self.folder / "best.pt"

    def salvaged_path(self, step: int) -> Path:
        """Returns the path of the salvaged checkpoint of `step`, saved after the loss of a rank."""
        return self.folder / f"step-{step:08d}.salvaged.pt"

    def steps(self) -> list[int]:
        """Returns the steps of regular checkpoints, in rising order."""
        return self._matching(_NAME)

    def salvaged_steps(self) -> list[int]:
        """Returns the steps of salvaged checkpoints, in rising order."""
        return self._matching(_SALVAGED_NAME)

    def _matching(self, name: re.Pattern[str]) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = (name.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def candidates(self) -> list[Path]:
        """Returns the checkpoints from which a run can resume, the newest first.

        For one step, the regular checkpoint precedes the salvaged one. The best checkpoint is last,
        because its name has no step.
        """
        known = [(step, 1, self.path(step)) for step in self.steps()]
        known += [(step, 0, self.salvaged_path(step)) for step in self.salvaged_steps()]
        newest_first = [path for _, _, path in sorted(known, reverse=True)]
        return newest_first + [self.best] * self.best.is_file()

    def newest(self) -> Path | None:
        """Returns the newest regular checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def put(self, checkpoint: Checkpoint, *, best: bool, forget: bool = True) -> Path:
        """Writes a checkpoint and removes old files.

        Args:
            checkpoint: The checkpoint.
            best: True to write the checkpoint as `best.pt`, too.
            forget: True to remove all but the last `keep` regular checkpoints.

        Returns:
            Path of the regular checkpoint.

        Raises:
            CheckpointError: If a file cannot be written or removed.
        """
        path = self.path(checkpoint.step)
        try:
            if best:
                # `best.pt` comes first: after a kill between the two writes, the resumed run repeats the
                # step and writes `best.pt` again. In the reverse order, `best.pt` would be outdated.
                checkpoint.write(self.best)
                link_atomically(self.best, path)
            else:
                checkpoint.write(path)
        except CheckpointError as error:
            last, remedy = self.newest(), error.remedy
            if last:
                remedy += f"; the last good checkpoint, {last.name}, is untouched"
            raise CheckpointError(error.cause, remedy) from error
        try:
            self._tidy(checkpoint.step, forget=forget)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove old files of {self.folder} after saving {path.name}: {error.strerror}",
                "make it writable again, then --resume auto",
            ) from error
        return path

    def _tidy(self, newest: int, *, forget: bool) -> None:
        # A run that resumed from an older checkpoint has abandoned the later checkpoints. They are
        # renamed, so that no resume takes them for the newest checkpoints.
        later = [self.path(step) for step in self.steps() if step > newest]
        salvaged = [(step, self.salvaged_path(step)) for step in self.salvaged_steps()]
        for file in later + [file for step, file in salvaged if step > newest]:
            set_aside(file, "abandoned")
        if forget:
            for step in self.steps()[: -self._keep]:
                self.path(step).unlink(missing_ok=True)
            for step, file in salvaged:
                if step <= newest:
                    file.unlink(missing_ok=True)
        for leftover in self.folder.glob(LEFTOVERS):
            leftover.unlink(missing_ok=True)


def set_aside(file: Path, reason: str) -> Path:
    """Renames a checkpoint so that no resume uses it.

    Args:
        file: The checkpoint.
        reason: The new suffix, as in `step-00000006.pt.damaged`. If a file of this name exists, a number
            is appended.

    Returns:
        The new path.
    """
    number, place = 1, file.with_name(f"{file.name}.{reason}")
    while place.exists():
        number += 1
        place = file.with_name(f"{file.name}.{reason}-{number}")
    return file.replace(place)


def find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a file, else the best or the newest checkpoint of the run folder."""
    if not path.is_dir():
        return path
    store = CheckpointStore(path / "checkpoints", 1)
    chosen = store.best if store.best.is_file() else store.newest()
    if chosen is None:
        raise CheckpointError(f"no checkpoint in {store.folder}", "give a run folder or a .pt file")
    return chosen


def write_atomically(path: Path, content: bytes | memoryview, *, parents: bool = True) -> None:
    """Writes and syncs a temporary file and renames it to `path`. An error leaves the old file untouched.

    Args:
        path: The file to write. Its folder is created if it is missing.
        content: The bytes to write.
        parents: True to create missing folders above the file's folder, too.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=parents, exist_ok=True)
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise CheckpointError(*_explain(path, len(content), error)) from error


def link_atomically(source: Path, path: Path) -> None:
    """Creates `path` as a hard link to `source`, or as a copy if the file system has no hard links."""
    temporary = part_path(path)
    try:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CheckpointError(*_explain(path, source.stat().st_size, error)) from error


def _explain(path: Path, length: int, error: OSError) -> tuple[str, str]:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left to write {path} ({length / 1e6:.1f} MB)",
            "free space or choose another --output, then --resume auto",
        )
    return (f"cannot write {path}: {error.strerror or error}", "check --output")
