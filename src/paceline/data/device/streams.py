"""CUDA streams for decoding and for copies of batches to the device ahead of their use.

torch gives freed memory back to the stream that allocated the memory. Work on other streams must
have finished by then, so these functions wait. On a CPU, where tests replace the GPU, they do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.data.batch import Batch, Chunk, kept_rows
from paceline.data.decode.decoder import BatchInProgress, Decoder


@contextmanager
def drained_stream(device: torch.device) -> Iterator[None]:
    """Makes a separate stream current, and waits at the end of the context for all work on it."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # torch hands out a few streams in turn, so this stream may have unfinished work.
        finish(stream)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                finish(stream)


def finish(stream: torch.cuda.Stream | None) -> None:
    """Waits until all work on `stream` has finished, without keeping a CPU core busy."""
    if stream is not None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()


def finish_current(device: torch.device) -> None:
    if device.type == "cuda":
        finish(torch.cuda.current_stream(device))


class CopyingDecoder(Decoder):
    """Copies the batches of a decoder on the host to the GPU ahead of their use.

    The thread that fills the last chunk of a batch queues the copy on a separate stream, so that
    the copy overlaps with the step of an earlier batch. The consumer's stream only waits for an
    event.
    """

    def __init__(self, inner: Decoder, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.draws = inner.draws
        # At least one thread, because the training thread must neither decode nor copy.
        self.workers = max(1, inner.workers)

    def begin(self, samples: int) -> BatchInProgress:
        if self._device.type != "cuda":
            return _CopiedBatch(self._inner.begin(samples), self._device, None)
        # Memory is pinned for this GPU, even if another GPU is current.
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            return _CopiedBatch(self._inner.begin(samples), self._device, self._stream)

    def describe(self) -> str:
        return self._inner.describe()

    def note(self) -> str:
        return self._inner.note()


class _CopiedBatch(BatchInProgress):
    def __init__(
        self, inner: BatchInProgress, device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._inner: BatchInProgress | None = inner
        self._device = device
        self._stream = stream
        self._copied: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        self.cuts = inner.cuts

    def fill(self, chunk: Chunk) -> None:
        assert self._inner is not None
        self._inner.fill(chunk)

    def complete(self) -> None:
        assert self._inner is not None
        batch = self._inner.finish(())
        # torch reuses the pinned memory after the copy has finished.
        self._inner = None
        if self._stream is None:
            images, labels = batch.images.to(self._device), batch.labels.to(self._device)
            self._copied = images, labels, None
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            images = batch.images.to(self._device, non_blocking=True)
            labels = batch.labels.to(self._device, non_blocking=True)
            self._copied = images, labels, self._stream.record_event()

    def finish(self, dropped: Sequence[int]) -> Batch:
        assert self._copied is not None
        images, labels, copied = self._copied
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # The copy stream owns the memory and must not reuse it before this stream has read it.
            images.record_stream(stream)
            labels.record_stream(stream)
        kept = kept_rows(len(labels), dropped)
        if kept is None:
            return Batch(images, labels)
        kept = kept.to(self._device)
        return Batch(images[kept], labels[kept])
