"""`CheckpointWriter`: writes checkpoints on a thread while training goes on.

The steps stand still only while the state is copied to host memory (`HostCopy`). Hashing, serializing,
writing, syncing and renaming happen on the thread, in the same order as without it, so a kill leaves the
previous checkpoint in place. At most one checkpoint is being written: the next save waits for it. Where
the host has no memory for the copy, the steps wait for the file.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, PacelineError
from paceline.core.host import available_cores
from paceline.train.checkpoint import Checkpoint
from paceline.train.machine import out_of_memory

# More do not copy faster: memory is the limit.
_COPY_THREADS = 4


@dataclass(frozen=True)
class Written:
    """The end of one save: its `path`, or the `error`. `save_s` is the time until the file was in place,
    `stall_s` the part of it in which no step could run. `note` says why that took longer than it
    should."""

    step: int
    best: bool
    save_s: float
    stall_s: float
    path: Path | None
    error: PacelineError | None
    note: str = ""


class _NoHostMemoryError(Exception):
    """For the copy of a tensor."""


class HostCopy:
    """Copies the tensors of checkpoints to host memory, which is kept from save to save.

    Tensors of a GPU go to pinned memory, and there is one wait for all of them: the copies are queued
    behind the last update, and no step is launched before they are complete. Allocating pinned memory, or
    touching new memory for the first time, would take longer than the copy itself. Where the system
    refuses to pin memory, `unpinned` has the reason, and the copy is slower.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self.unpinned = ""

    def take(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """A copy that later steps do not change, valid until the next call. None where the host has no
        memory for it; what was kept is free then."""
        kept, self._kept = self._kept, {}
        # Of the same memory only one copy: tied weights have two names.
        seen: dict[tuple[Any, ...], Tensor] = {}
        copies: list[tuple[Tensor, Tensor]] = []

        def place_for(value: Tensor, where: tuple[Any, ...]) -> Tensor:
            source = value.detach()
            key = (source.data_ptr(), source.dtype, source.shape, source.stride())
            if source.data_ptr() and key in seen:
                return seen[key]
            place = kept.get(where)
            if place is None or not _fits(place, source):
                place = self._new_place(source)
            copies.append((place, source))
            self._kept[where] = seen[key] = place
            return place

        try:
            copy = checkpoint.with_tensors(place_for)
        except _NoHostMemoryError:
            self._kept = {}
            kept.clear()
            seen.clear()
            copies.clear()
            _free_pinned_memory()
            return None
        _copy_all(copies)
        return copy

    def _new_place(self, source: Tensor) -> Tensor:
        pin = source.is_cuda and not self.unpinned
        try:
            return torch.empty_like(source, device="cpu", pin_memory=pin)
        except (RuntimeError, MemoryError) as error:
            # Of pinned memory CUDA reports it as an error of the device, of which there are others.
            if "out of memory" in str(error) or out_of_memory(error, "", "") is not None:
                raise _NoHostMemoryError from error
            if not pin:
                raise
            # A limit of the system. If the device itself is lost, the copy raises that once more.
            self.unpinned = (str(error).splitlines() or [type(error).__name__])[0][:200]
            return self._new_place(source)


def _free_pinned_memory() -> None:
    """Gives the memory that torch keeps for later pinned tensors back to the system."""
    free = getattr(torch._C, "_host_emptyCache", None)
    if free is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        free()


def _copy_all(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    """From a GPU all at once, and from the CPU on several cores, which no step uses now."""
    from_gpu = [pair for pair in copies if pair[1].is_cuda]
    for place, source in from_gpu:
        place.copy_(source, non_blocking=True)
    largest_first = sorted(
        (pair for pair in copies if not pair[1].is_cuda), key=lambda pair: -pair[1].numel()
    )
    threads = min(_COPY_THREADS, available_cores())
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_copy_share, (largest_first[n::threads] for n in range(threads))))
    for device in {source.device for _, source in from_gpu}:
        torch.cuda.current_stream(device).synchronize()


@torch.no_grad()
def _copy_share(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for place, source in copies:
        place.copy_(source)


def _fits(place: Tensor, source: Tensor) -> bool:
    if (place.dtype, place.shape) != (source.dtype, source.shape):
        return False
    # The copy of a tensor with gaps has none.
    return (
        place.stride() == source.stride()
        or place.stride() == torch.empty_like(source, device="meta").stride()
    )


class CheckpointWriter:
    """Writes one checkpoint at a time; without `background`, before `save` returns.

    All methods are called from one thread; what the thread has done is picked up with `take_written`.
    """

    def __init__(self, *, background: bool) -> None:
        self._background = background
        self._copy = HostCopy()
        self._thread: threading.Thread | None = None
        self._written: Written | None = None
        self._noted: set[str] = set()

    def save(
        self, checkpoint: Checkpoint, write: Callable[[Checkpoint], Path], *, best: bool,
        started: float,
    ) -> None:  # fmt: skip
        """`write` puts the checkpoint into its place; `started` is when the save began, in seconds of
        `perf_counter`. The previous one must have been picked up."""
        assert self._thread is None
        assert self._written is None
        if not self._background:
            self._write(checkpoint.on_host(), write, best, started, None)
            return
        copy = self._copy.take(checkpoint)
        if copy is None:
            self._write(checkpoint.on_host(), write, best, started, None)
            self._note_no_memory()
            return
        note = self._note_unpinned()
        stall_s = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write,
            args=(copy, write, best, started, stall_s, note),
            name="checkpoint writer",
            # A process that has to end does not wait for a disk that hangs.
            daemon=True,
        )
        self._thread.start()

    def _note_unpinned(self) -> str:
        """Once in a run."""
        if "unpinned" in self._noted or not self._copy.unpinned:
            return ""
        self._noted.add("unpinned")
        return (
            f"copies of checkpoints are slower: the system pins no memory ({self._copy.unpinned}); raise "
            "its limit (ulimit -l), or use checkpoint.background=false"
        )

    def _note_no_memory(self) -> None:
        """Once in a run."""
        assert self._written is not None
        if "no memory" not in self._noted:
            self._noted.add("no memory")
            text = (
                f"training waited for the checkpoint of step {self._written.step}: the host has no "
                "memory for a copy of it; free some, or use checkpoint.background=false"
            )
            self._written = replace(self._written, note=text)

    def _write(
        self,
        checkpoint: Checkpoint,
        write: Callable[[Checkpoint], Path],
        best: bool,
        started: float,
        stall_s: float | None,
        note: str = "",
    ) -> None:
        path, error = None, None
        try:
            path = write(checkpoint)
        except PacelineError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001  (on a thread nobody else would report it)
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
        """The end of the last save, once; None where nothing has ended since. `wait`: until it has."""
        if self._thread is not None:
            if wait:
                self._thread.join()
            if self._thread.is_alive():
                return None
            self._thread = None
        written, self._written = self._written, None
        return written
