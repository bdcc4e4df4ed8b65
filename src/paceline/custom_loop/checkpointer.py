"""`Checkpointer`: saves the state of a custom loop on all ranks, and resumes it bit for bit.

    folder/step-00000120/rank-0.pt … rank-7.pt, manifest.json

Every rank writes a file, because batch-norm statistics, random numbers and loader positions differ
between ranks. If a tensor equals a tensor of rank 0, a rank's file contains only a reference to rank
0's file. So replicated weights and momenta are stored once. Rank 0 writes the manifest with the size
and SHA-256 of each file and then renames the folder, so a checkpoint is either complete or absent.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from paceline.comm.process_groups import all_gather_json
from paceline.core.errors import CheckpointError, ConfigError, PacelineError
from paceline.core.files import part_path, read_regular, sync_directory, whole_file
from paceline.core.untrusted import ParseError, is_count, parse_json
from paceline.custom_loop.context import agreed, several_ranks
from paceline.custom_loop.state_tree import decoded, encoded, map_tensors, reference, tensors_of
from paceline.models import load_tensors
from paceline.train.checkpoint import content_hash, set_aside

_FORMAT = "paceline-own-loop"
_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTS = ".step-*.tmp"
_OTHER_RUN = "give the objects that were saved, or another folder"


class Stateful(Protocol):
    """An object with a state dict, such as a model, optimizer, scheduler, loader or `Prepared`."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class Checkpointer:
    """Saves and restores the state of a custom loop.

    For each rank, a checkpoint contains the state dicts of the given objects, `extra`, and the states of
    the random number generators of Python, NumPy, torch and the current CUDA device. All ranks must call
    `save` and `restore` at the same point, with a shared folder. If one rank fails, all ranks raise the
    same error. If a process is killed during a save, the older checkpoints stay unchanged. Files are read
    with `weights_only=True`, so loading executes no code.

    A resume needs the same number of ranks as the saved run.

    Attributes:
        folder: The folder of the checkpoints.
        keep: Number of checkpoints to keep.
        extra: The values that were saved as `extra` in the restored checkpoint.
        notes: One text for each damaged checkpoint that `restore` has skipped, with the reason.

    Example:
        >>> import tempfile, torch
        >>> net, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> checkpointer = Checkpointer(folder, keep=2)
        >>> checkpointer.restore(model=net) is None  # there is no checkpoint yet
        True
        >>> path = checkpointer.save(120, model=net, extra={"best": 0.5})
        >>> checkpointer.restore(model=net), checkpointer.extra
        (120, {'best': 0.5})
    """

    def __init__(self, folder: str | PathLike[str], keep: int = 2) -> None:
        """Sets the folder; does not access any file yet.

        Args:
            folder: The folder of the checkpoints.
            keep: Number of checkpoints to keep.

        Raises:
            ConfigError: If `keep` is less than 1.
        """
        if not is_count(keep, 1):
            raise ConfigError("keep", keep, "must be at least 1", "2 is usual")
        self.folder = Path(folder)
        self.keep = keep
        self.extra: dict[str, Any] = {}
        self.notes: list[str] = []

    def save(
        self, step: int, *, extra: Mapping[str, Any] | None = None, **objects: Stateful
    ) -> Path:
        """Saves a checkpoint. All ranks call this.

        Args:
            step: Number of completed steps.
            extra: Further plain values and tensors to save.
            **objects: The objects to save, by name.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: If a state cannot be saved, or a file cannot be written.
            ConfigError: If an argument is invalid or differs between ranks.
        """
        rank, world = _place()
        part = None
        try:
            with agreed(lambda: {"step": step, "the saved objects": sorted(objects)}):
                if not is_count(step):
                    raise ConfigError("step", step, "must be a whole number, 0 or more")
                # Random states first, because the calls of state_dict may draw random numbers.
                state: dict[str, Any] = {"random": _Random().state_dict()}
                state["extra"] = dict(extra or {})
                state["objects"] = {name: _state(name, it) for name, it in objects.items()}
                tree = encoded(state, "")
                if rank == 0:
                    part = part_path(self.folder / _step_name(step))
                    with _explained(f"cannot write {part}"):
                        part.mkdir(parents=True)
            return self._write(step, tree, str(part), rank, world)
        finally:
            if part is not None:
                shutil.rmtree(part, ignore_errors=True)

    def _write(self, step: int, tree: Any, place: str, rank: int, world: int) -> Path:
        hashed = tensors_of(tree) if rank == 0 and world > 1 else []
        digests = _from_rank_0([content_hash(tensor) for tensor in hashed], place)
        part = Path(digests.pop())
        name = f"rank-{rank}.pt"
        with agreed():
            if not part.is_dir():
                raise CheckpointError(
                    f"rank {rank} does not see {part}, which rank 0 has created",
                    "give a folder that all ranks share",
                )
            if rank > 0:
                shared = {digest: number for number, digest in enumerate(digests)}
                tree = map_tensors(tree, lambda t: reference(t, shared))
            buffer = io.BytesIO()
            torch.save(tree, buffer)
            content = buffer.getbuffer()
            what = f"cannot write {part / name} ({len(content) / 1e6:.1f} MB)"
            with _explained(what), whole_file(part / name) as file:
                file.write(content)
            entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        entries = all_gather_json(entry) if several_ranks() else [entry]
        with agreed():
            path = str(self._publish(step, part, entries, world)) if rank == 0 else ""
        return Path(_from_rank_0([], path)[-1])

    def _publish(self, step: int, part: Path, entries: list[Any], world: int) -> Path:
        manifest = {
            "format": _FORMAT, "version": _VERSION, "step": step, "world_size": world,
            "files": {f"rank-{rank}.pt": entry for rank, entry in enumerate(entries)},
        }  # fmt: skip
        with _explained(f"cannot write {part}"):
            with whole_file(part / "manifest.json") as file:
                file.write(json.dumps(manifest, indent=1).encode())
            path = self.folder / _step_name(step)
            revision = 1
            while path.exists():  # it may be the last good checkpoint, so it is not replaced
                revision += 1
                path = self.folder / f"{_step_name(step)}.{revision}"
            part.replace(path)
            sync_directory(self.folder)
        with _explained(f"cannot remove old checkpoints of {self.folder}"):
            self._tidy(path)
        return path

    def _tidy(self, newest: Path) -> None:
        checkpoints = self._checkpoints()
        end = checkpoints.index(newest) + 1
        # A loop that has resumed from an older checkpoint has abandoned the later checkpoints. A resume
        # must not take one of them as the newest.
        for later in checkpoints[end:]:
            set_aside(later, "abandoned")
        for old in checkpoints[:end][: -self.keep]:
            # Renamed first, so that a kill leaves no checkpoint without its files.
            shutil.rmtree(old.replace(part_path(old)))
        for leftover in self.folder.glob(_PARTS):
            shutil.rmtree(leftover, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        """Returns all checkpoints, the oldest first."""
        if not self.folder.is_dir():
            return []
        named = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return [p for _, _, p in sorted((int(m[1]), int(m[2] or 1), p) for m, p in named if m)]

    def restore(self, **objects: Stateful | None) -> int | None:
        """Loads the newest undamaged checkpoint. All ranks call this.

        Skips damaged checkpoints with a warning, and adds the reasons to the attribute `notes`. Also
        sets the attribute `extra`.

        Args:
            **objects: The objects to load, by the names under which they were saved. None skips the
                state under this name.

        Returns:
            The step of the checkpoint, or None if the folder has no checkpoint.

        Raises:
            CheckpointError: If the checkpoint does not fit the objects or the number of ranks, or all
                checkpoints are damaged.
        """
        rank, world = _place()
        for name, it in objects.items():
            if it is not None:
                _stateful(name, it)
        names = [path.name for path in self._checkpoints()] if rank == 0 else []
        names = _from_rank_0(names, "")[:-1]
        self.notes = []
        for name in reversed(names):
            path = self.folder / name
            step, state, error = 0, dict[str, Any](), None
            try:
                step, state = _read(path, rank, world)
            except _DamagedError as caught:
                error = caught
            damaged = _first_text(error)
            if damaged:
                self.notes.append(damaged)
                if rank == 0:
                    warnings.warn(f"{damaged}; skipped", stacklevel=2)
                continue
            self._load(path, state, objects)
            return step
        if names:
            raise CheckpointError(
                f"all {len(names)} checkpoints in {self.folder} are damaged: {self.notes[0]}",
                "start in another folder",
            )
        return None

    def _load(
        self, path: Path, state: dict[str, Any], objects: Mapping[str, Stateful | None]
    ) -> None:
        saved = state["objects"]
        with agreed():
            if saved.keys() != objects.keys():
                raise CheckpointError(
                    f"{path} contains {', '.join(sorted(saved)) or 'no object'}, but the call names "
                    f"{', '.join(sorted(objects)) or 'none'}",
                    "name all saved objects; pass None for an object to skip it",
                )
            for name, target in objects.items():
                if target is not None:
                    _load_one(path, name, target, saved[name])
            _load_one(path, "random", _Random(), state["random"])
            self.extra = state["extra"]


class _DamagedError(CheckpointError):
    """Raised if the content of a checkpoint differs from the content that was written."""


def _load_one(path: Path, name: str, target: Stateful, state: Any) -> None:
    try:
        target.load_state_dict(state)
    except PacelineError:
        raise
    except Exception as error:  # a state of another program can raise anything
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{name} does not fit {path} ({reason})", _OTHER_RUN) from error


def _read(path: Path, rank: int, world: int) -> tuple[int, dict[str, Any]]:
    """Reads the step and this rank's state from a checkpoint.

    Raises:
        _DamagedError: If the checkpoint is damaged.
        CheckpointError: If the checkpoint was saved on a different number of ranks.
    """
    manifest = _manifest(path)
    saved = manifest["world_size"]
    if saved != world:
        raise CheckpointError(
            f"{path} was saved on {saved} ranks, but this job has {world}",
            f"start {saved} ranks: random numbers and batch-norm statistics differ between ranks",
        )
    first = _load_file(path, manifest, 0)
    own = first if rank == 0 else _load_file(path, manifest, rank)
    try:
        tensors = tensors_of(first) if rank > 0 else []
        state = decoded(own, tensors)
        if all(isinstance(state[name], dict) for name in ("random", "extra", "objects")):
            return manifest["step"], state
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError):
        pass
    raise _DamagedError(f"{path} is damaged: rank-{rank}.pt has unexpected content")


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = parse_json(read_regular(path / "manifest.json"))
    except OSError as error:
        raise _DamagedError(f"{path} is damaged: manifest.json: {error.strerror}") from None
    except ParseError as error:
        raise _DamagedError(f"{path} is damaged: manifest.json {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise _DamagedError(f"{path} is damaged: manifest.json is not a manifest")
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path} has format {manifest.get('version')}, this Paceline reads {_VERSION}",
            "use the Paceline version that wrote it",
        )
    world, files = manifest.get("world_size"), manifest.get("files")
    whole = is_count(manifest.get("step")) and is_count(world, 1, 1 << 20)
    if not whole or not isinstance(files, dict) or len(files) != world:
        raise _DamagedError(f"{path} is damaged: manifest.json lacks step, ranks or files")
    return manifest


def _load_file(path: Path, manifest: dict[str, Any], rank: int) -> Any:
    name = f"rank-{rank}.pt"
    entry = manifest["files"].get(name)
    try:
        content = read_regular(path / name, most_bytes=None)
    except OSError as error:
        raise _DamagedError(f"{path} is damaged: {name}: {error.strerror}") from None
    digest = hashlib.sha256(content).hexdigest()
    if not isinstance(entry, dict) or (entry.get("bytes"), entry.get("sha256")) != (
        len(content), digest,
    ):  # fmt: skip
        raise _DamagedError(f"{path} is damaged: {name} does not match its SHA-256")
    try:
        return load_tensors(io.BytesIO(content))
    except Exception as error:  # noqa: BLE001  (unpickling foreign bytes can raise anything)
        reason = type(error).__name__
        raise _DamagedError(f"{path} is damaged: {name} cannot be read ({reason})") from None


def _state(name: str, it: Any) -> Any:
    target = _stateful(name, it)
    try:
        return target.state_dict()
    except PacelineError:
        raise
    except Exception as error:  # the other ranks wait for this rank
        raise CheckpointError(
            f"{name}.state_dict() raised {type(error).__name__}: {error}", "see its traceback"
        ) from error


def _stateful(name: str, it: Any) -> Stateful:
    if not (hasattr(it, "state_dict") and hasattr(it, "load_state_dict")):
        raise ConfigError(
            name, type(it).__name__, "has no state_dict() and load_state_dict()",
            "add both methods to its class, or save its state as a plain value in extra=",
        )  # fmt: skip
    target: Stateful = it
    return target


class _Random:
    """Saves and restores the states of all random number generators in this process."""

    def state_dict(self) -> dict[str, Any]:
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns errors of the operating system in the block into a CheckpointError about `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror or error}",
            "free space or choose another folder; older checkpoints are untouched",
        ) from error


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if several_ranks() else (0, 1)


def _from_rank_0(texts: list[str], last: str) -> list[str]:
    """Broadcasts rank 0's `texts` and `last`; returns them as one list on all ranks."""
    mine = [*texts, last]
    if not several_ranks():
        return mine
    return [str(text) for text in all_gather_json(mine if dist.get_rank() == 0 else [])[0]]


def _first_text(error: _DamagedError | None) -> str:
    """Returns the error message of the lowest rank that has an error; "" if no rank has one."""
    mine = error.cause if error else ""
    gathered = all_gather_json(mine) if several_ranks() else [mine]
    return next(filter(None, gathered), "")
