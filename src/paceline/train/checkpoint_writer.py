"""`CheckpointWriter`: writes checkpoints on a thread while training continues.

Training waits only while the state is copied to host memory (`HostCopy`). The thread then writes a
temporary file and renames it at the end, so if the process is killed, the previous checkpoint stays in
place. Only one checkpoint is written at a time: the next save waits until the file is complete. If the
host has no memory for the copy, training waits for the file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, PacelineError
from paceline.train.checkpoint import Checkpoint
from paceline.train.machine import out_of_memory


@dataclass(frozen=True)
class Written:
    """The result of saving one checkpoint.

    Attributes:
        step: Number of completed steps in the checkpoint.
        best: True if the checkpoint was saved as the best one.
        save_s: Time from the start of the save until the file was in place, in seconds.
        stall_s: Part of `save_s` in which training waited.
        path: The file, or None after an error.
        error: The error, or None after a success.
        note: Reason why training had to wait for the file, to be displayed once; "" if it did not wait.
    """

    step: int
    best: bool
    save_s: float
    stall_s: float
    path: Path | None
    error: PacelineError | None
    note: str = ""


class _NoHostMemoryError(Exception):
    """Raised if the host has no memory for the copy of a tensor, or cannot pin it."""


class HostCopy:
    """Copies the tensors of checkpoints to host memory, which is reused from save to save.

    GPU tensors are copied to pinned memory. All copies are queued behind the last update of the
    weights, and `take` returns when all copies are complete, so that the next step cannot change what
    is copied. The memory is reused, because allocating pinned memory, or touching new memory for the
    first time, takes longer than the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        # Reason why the last call made no copy.
        self.problem = ""

    def take(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Copies a checkpoint to host memory. The copy is valid until the next call.

        Returns:
            The copy, or None if the host has no memory for the copy. In that case the reused memory
            is freed.
        """
        kept, self._kept = self._kept, {}
        # Memory that two tensors share is copied once. For example, tied weights have two names.
        seen: dict[tuple[Any, ...], Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []

        def place_for(value: Tensor, where: tuple[Any, ...]) -> Tensor:
            source = value.detach()
            key = (source.data_ptr(), source.dtype, source.shape, source.stride())
            if source.data_ptr() and key in seen:
                return seen[key]
            place = kept.get(where)
            if place is None or not _fits(place, source):
                place = _new_place(source)
            copies.append((place, source))
            self._kept[where] = seen[key] = place
            return place

        try:
            copy = checkpoint.with_tensors(place_for)
        except _NoHostMemoryError as error:
            self.problem = str(error)
            self._kept = {}
            kept.clear()
            seen.clear()
            copies.clear()
            _free_pinned_memory()
            return None
        # The copies from a GPU are queued; the synchronization below waits for all of them.
        for place, source in copies:
            place.copy_(source, non_blocking=source.is_cuda)
        for device in {source.device for _, source in copies if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copy


def _new_place(source: Tensor) -> Tensor:
    try:
        return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda)
    except (RuntimeError, MemoryError) as error:
        # CUDA reports a lack of pinned memory, and a limit of the system, as errors of the device. If the
        # device itself is lost, the save without a host copy raises the error again.
        if not source.is_cuda and out_of_memory(error, "", "") is None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise _NoHostMemoryError(reason) from error


def _free_pinned_memory() -> None:
    """Returns the pinned memory that torch keeps for later tensors to the system."""
    free = getattr(torch._C, "_host_emptyCache", None)
    if free is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free()


def _fits(place: Tensor, source: Tensor) -> bool:
    if (place.dtype, place.shape) != (source.dtype, source.shape):
        return False
    # `empty_like` creates no gaps between elements, even if the source has gaps.
    return (
        place.stride() == source.stride()
        or place.stride() == torch.empty_like(source, device="meta").stride()
    )


class CheckpointWriter:
    """Writes one checkpoint at a time, on a thread, or before `save` returns if `background` is False.

    All methods must be called from one thread. `take_written` returns the result.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._noted = False

    def save(
        self, checkpoint: Checkpoint, write: Callable[[Checkpoint], Path], *, best: bool,
        started: float,
    ) -> None:  # fmt: skip
        """Saves a checkpoint. The result of the previous save must have been taken.

        Args:
            checkpoint: The checkpoint, whose tensors the next step may change.
            write: Writes the file and returns its path.
            best: True if this is the best checkpoint.
            started: Time at which the save began (`time.perf_counter`).
        """
        assert self._thread is None
        assert self._written is None
        copy = self._copy.take(checkpoint) if self._background else None
        if copy is None:
            note = self._note_no_copy(checkpoint.step) if self._background else ""
            self._write(checkpoint.on_host(), write, best, started, None, note)
            return
        stall_s = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write,
            args=(copy, write, best, started, stall_s),
            name="checkpoint writer",
            # A process that must end does not wait for a disk that hangs.
            daemon=True,
        )
        self._thread.start()

    def _note_no_copy(self, step: int) -> str:
        """Returns a note for the first save for whose copy memory was missing; "" for later ones."""
        if self._noted:
            return ""
        self._noted = True
        return (
            f"training waits for the checkpoint of step {step}: the host has no memory for a copy of it "
            f"({self._copy.problem}); free some, raise the limit of pinned memory (ulimit -l), or use "
            "checkpoint.background=false"
        )

    def _write(
        self, checkpoint: Checkpoint, write: Callable[[Checkpoint], Path], best: bool,
        started: float, stall_s: float | None, note: str = "",
    ) -> None:  # fmt: skip
        path, error = None, None
        try:
            path = write(checkpoint)
        except PacelineError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001  (nothing else reports errors of the thread)
            error = CheckpointError(
                f"the checkpoint of step {checkpoint.step} was not written: "
                f"{type(caught).__name__}: {caught}",
                "the previous checkpoint is untouched; continue with --resume auto",
            )
            error.__cause__ = caught
        save_s = time.perf_counter() - started
        stall_s = save_s if stall_s is None else stall_s
        self._written = Written(checkpoint.step, best, save_s, stall_s, path, error, note)

    def take_written(self, *, wait: bool) -> Written | None:
        """Returns the result of the last save, once.

        Args:
            wait: True to wait for a save that is in progress.

        Returns:
            The result, or None if no save has ended since the last call.
        """
        if self._thread is not None:
            if wait:
                self._thread.join()
            if self._thread.is_alive():
                return None
            self._thread = None
        written, self._written = self._written, None
        return written
