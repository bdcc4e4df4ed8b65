"""`CopiedAhead`: a loader whose batches are on the device before they are asked for.

In: a loader of batches in pinned memory. Out: the same batches in device memory. One thread takes them
as they get ready and copies them on a stream of its own, so that the copy of the next batch runs beside
this batch's step, and the training's stream waits for an event and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

import torch

from paceline.data.batch import Batch
from paceline.data.corrupt import CorruptSample
from paceline.data.loader_protocol import TrainBatches
from paceline.data.prefetch import Check, Job, Prefetcher

# The batch of the next step, and the one that is being copied meanwhile.
_DEPTH = 2
_Copied = tuple[Batch, Any]


class CopiedAhead:
    """`TrainBatches`, around one. On a CPU nothing is copied, only taken ahead."""

    def __init__(self, inner: TrainBatches, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._over = False
        self._ahead = Prefetcher(self._jobs(), workers=1, depth=_DEPTH)

    def _jobs(self) -> Iterator[Job[_Copied, Batch]]:
        while not self._over:
            yield Job([self._copy], self._hand_over)

    def _copy(self, check: Check) -> _Copied:
        if self._device.type != "cuda":
            return self._take(), None
        # Also for the inner loader: what it pins belongs to this GPU, not to the first.
        with torch.cuda.device(self._device):
            batch = self._take()
            check()
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                # Pinned memory goes back to torch at once, which keeps it until the copy is done.
                images = batch.images.to(self._device, non_blocking=True)
                labels = batch.labels.to(self._device, non_blocking=True)
                copied = self._stream.record_event()
        return replace(batch, images=images, labels=labels), copied

    def _take(self) -> Batch:
        """The end of the inner loader surfaces where its batch would be due."""
        try:
            return next(self._inner)
        except StopIteration:
            self._over = True
            raise

    def _hand_over(self, parts: list[_Copied]) -> Batch:
        [(batch, copied)] = parts
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # The memory belongs to the copying stream, which must not reuse it before this one read it.
            batch.images.record_stream(stream)
            batch.labels.record_stream(stream)
        return batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._ahead)

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """Of the batches handed over, and of those taken ahead."""
        return self._inner.corrupt

    def describe(self) -> str:
        return self._inner.describe()

    def remark(self) -> str:
        return self._inner.remark()

    def close(self) -> None:
        """The inner loader first: the thread may be waiting for it."""
        self._inner.close()
        self._ahead.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
