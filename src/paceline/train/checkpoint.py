"""`Checkpoint`: the state of a run at the end of a step, and its file.

In: plain tables and tensors. Out: one file, readable with `torch.load(weights_only=True)`, written
atomically. Batch-norm statistics are in it once for each rank.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.train.atomic_file import write_atomically
from paceline.version import __version__

FORMAT = "paceline-checkpoint"
VERSION = 1


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
    sampler: dict[str, Any]
    schedule: dict[str, Any]
    rng: dict[str, Any]
    classes: list[str]
    versions: dict[str, str]

    @property
    def step(self) -> int:
        return int(self.progress["step"])

    def to_bytes(self) -> memoryview:
        buffer = io.BytesIO()
        table = {name: getattr(self, name) for name in self.__dataclass_fields__}
        torch.save({"format": FORMAT, "version": VERSION, **table}, buffer)
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
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} is broken or not a checkpoint ({_first_line(error)})",
                "resume from an older one with --resume FILE",
            ) from None
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is not a Paceline checkpoint",
                "weights of other programs are taken with --pretrained FILE",
            )
        if table["version"] != VERSION:
            raise CheckpointError(
                f"{path} has format {table['version']}; Paceline {__version__} reads {VERSION}",
                "use the Paceline version that wrote it",
            )
        try:
            return cls(**{name: table[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise CheckpointError(f"{path} lacks {error}", "resume from an older one") from None


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}", "check the path") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "check the path") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:120]
