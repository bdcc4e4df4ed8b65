"""`Checkpoint`: the state of a run at the end of a step, and its file.

In: plain tables and tensors. Out: one file, readable with `torch.load(weights_only=True)`, written
atomically. Batch-norm statistics are in it once for each rank. A SHA-256 over the content is in it
too, because torch reads a file with damaged numbers without a word.
"""

from __future__ import annotations

import errno
import hashlib
import io
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.untrusted import is_count
from paceline.train.atomic_file import write_atomically
from paceline.version import __version__

FORMAT = "paceline-checkpoint"
VERSION = 3
# Before 3 there was no average.
_READABLE = (2, 3)
_FOREIGN = "weights of other programs are taken with --pretrained FILE"
_OLDER = "resume from an older one with --resume FILE"


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose content is not what was written."""


class ForeignCheckpointError(CheckpointError):
    """A file that is not a checkpoint of Paceline."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a bit-identical continuation needs.

    Schedule, data order and randomness are pure functions of the configuration and the step, so the
    step is their whole state; `sampler`, `schedule` and `rng` say it in plain words for readers and are
    checked on resuming.
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
    # What `WeightAverage.capture` gave; empty where none was kept.
    average: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    @property
    def salvaged_by(self) -> int | None:
        """The rank that wrote it alone, after another one was lost: it holds that rank's batch-norm
        statistics only. None for a regular checkpoint."""
        rank = self.batch_norm.get("only_rank")
        return None if rank is None else int(rank)

    def to_bytes(self) -> memoryview:
        buffer = io.BytesIO()
        table = {name: getattr(self, name) for name in self.__dataclass_fields__}
        head = {"format": FORMAT, "version": VERSION, "sha256": content_hash(table)}
        torch.save({**head, **table}, buffer)
        return buffer.getbuffer()

    def write(self, path: Path) -> None:
        write_atomically(path, self.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        return cls.from_bytes(read_file(path), path)

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> Checkpoint:
        """Refuses what is cut, damaged, foreign or of a later format, each in its own words."""
        try:
            table = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            table = table if isinstance(table, dict) else {}
            ours = bool(table.get("format") == FORMAT)
            parts = {name: table[name] for name in cls.__dataclass_fields__ if name in table}
            intact = ours and bool(table.get("sha256") == content_hash(parts))
        except Exception as error:  # noqa: BLE001  (damaged bytes make unpickling raise anything)
            raise _unreadable(path, content, error) from None
        if not ours:
            raise ForeignCheckpointError(f"{path} is not a Paceline checkpoint", _FOREIGN)
        if table.get("version") not in _READABLE and not intact:
            raise CheckpointError(
                f"{path} has format {table.get('version')}; Paceline {__version__} reads "
                f"{' and '.join(str(version) for version in _READABLE)}",
                "use the Paceline version that wrote it",
            )
        # A later format has other parts; where ours match their SHA-256 the version itself is damaged.
        if not intact or table.get("version") not in _READABLE:
            raise DamagedCheckpointError(
                f"{path} is damaged: its content does not match its SHA-256", _OLDER
            )
        _check_types(parts, path)
        return cls(**parts)


_TYPES: dict[str, type] = {"world_size": int, "threads": int, "classes": list}


def _check_types(parts: dict[str, Any], path: Path) -> None:
    """A right checksum does not make a whole checkpoint: another program may have written it."""
    step = parts["progress"].get("step") if isinstance(parts.get("progress"), dict) else None
    wrong = [
        name
        for name in Checkpoint.__dataclass_fields__
        if name != "average" and type(parts.get(name)) is not _TYPES.get(name, dict)
    ]
    if wrong or not is_count(step) or not isinstance(parts.get("average", {}), dict):
        what = wrong[0] if wrong else "progress.step"
        raise CheckpointError(f"{path} is broken: {what} is missing or of another type", _OLDER)


def content_hash(value: Any) -> str:
    """SHA-256 over names, values and the tensors' bytes, in order."""
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
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}", "check the path") from None
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{path} is damaged: {error.strerror}", _OLDER) from None
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from None


def _unreadable(path: Path, content: bytes, error: Exception) -> CheckpointError:
    """Torch's own text is long and advises to trust the file; this says what is the matter."""
    foreign = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if foreign:
        cause = f"{path} is not a Paceline checkpoint: it holds objects of {foreign[1]}"
        return ForeignCheckpointError(cause, _FOREIGN)
    reason = "it is cut short or damaged" if content else "it is empty"
    return DamagedCheckpointError(f"{path} is broken or not a checkpoint: {reason}", _OLDER)
