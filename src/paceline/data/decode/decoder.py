"""`Decoder`: makes the images of batches out of samples; `PillowDecoder`, which decodes whole images.

A loader begins a batch with `begin`, fills its chunks in threads and finishes it in the thread that
consumes it. All decoders give the same samples, boxes and flips; the host's decoders give the same
pixels and errors, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from time import perf_counter

import numpy as np

from paceline.core.errors import PacelineError
from paceline.data.augment import Pixels, SquareTransform, Transform
from paceline.data.batch import Batch, BatchBuffer, Chunk
from paceline.data.image import CorruptImage, CorruptSample, decode
from paceline.data.prefetch import Progress, cut
from paceline.data.sources.base import Source, Stored


class RegionUnavailableError(PacelineError):
    """There is no region decoder here; cause and remedy."""


class BatchInProgress(ABC):
    """A batch while it is made. `cuts` are the chunks in which it is filled: first and last row of
    each."""

    cuts: Sequence[tuple[int, int]]

    @abstractmethod
    def fill(self, chunk: Chunk) -> None:
        """Fills the rows of `chunk`, in any thread. DataError where storage fails."""

    def complete(self) -> None:  # noqa: B027  (most have nothing to do)
        """Called once all chunks are filled, in the thread that filled the last one."""

    @abstractmethod
    def finish(self, dropped: Sequence[int]) -> Batch:
        """The batch without the rows `dropped`; called by the consumer, after `complete`."""


class Decoder(ABC):
    """Used by many threads at once.

    `draws`: uniform numbers that a sample takes. `workers`: threads that are to fill chunks; 0
    means the consumer's own. `corrupt`: samples that are known to be corrupt before any batch is
    made.
    """

    draws: int
    workers: int
    corrupt: Sequence[CorruptSample] = ()

    @abstractmethod
    def begin(self, samples: int) -> BatchInProgress:
        """Allocates a batch; called by the consumer."""

    @abstractmethod
    def describe(self) -> str:
        """How the batches are made, for display: `resident on cuda:0, 146 MiB`, `2 threads`."""

    def note(self) -> str:
        """Which samples were not decoded as `describe` says; empty where all were."""
        return ""


@dataclass(eq=False)
class PillowDecoder(Decoder):
    """Decodes the whole image in host memory, then augments. Takes whatever Pillow takes. `notes` go
    with the description."""

    source: Source
    transform: Transform
    _: KW_ONLY
    channels: int
    workers: int = 0
    pin_memory: bool = False
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.draws = self.transform.draws

    def begin(self, samples: int) -> HostBatch:
        return HostBatch(
            self, BatchBuffer(samples, self.transform.size, self.channels, self.pin_memory)
        )

    def fill(self, chunk: Chunk, out: Pixels) -> None:
        """The pixels of a chunk, a row each."""
        chunk.replace_known()
        filled = set(self.fill_together(chunk, out)) if len(chunk) > 1 else ()
        for row in range(len(chunk)):
            if row not in filled:
                chunk.progress.check()
                self.fill_row(chunk, row, out[row])

    def fill_together(self, chunk: Chunk, out: Pixels) -> Sequence[int]:
        """Rows that a quicker way filled; the others are decoded one by one."""
        return ()

    def fill_row(self, chunk: Chunk, row: int, out: Pixels) -> None:
        """One row; a corrupt sample gives it to its successor, unless the row is dropped."""
        chunk.replace_known([row])
        while not chunk.is_dropped(row):
            index = int(chunk.indices[row])
            start = perf_counter()
            try:
                data = self.source.read(index)
                chunk.progress.add("read", perf_counter() - start)
                self.prepare(data, chunk.numbers[row].tolist(), out, chunk.progress)
                return
            except CorruptImage as error:
                chunk.replace(row, CorruptSample(index, self.source.name(index), str(error)))

    def prepare(
        self, data: Stored, numbers: Sequence[float], out: Pixels, progress: Progress
    ) -> None:
        """Decodes and augments one sample. CorruptImage leaves `out` undefined."""
        start = perf_counter()
        if self._copied(data, numbers, out):
            progress.add("augment", perf_counter() - start)
            return
        image = decode(data, self.channels)
        decoded = perf_counter()
        self.transform(image, numbers, out)
        progress.add("decode", decoded - start)
        progress.add("augment", perf_counter() - decoded)

    def _copied(self, data: Stored, numbers: Sequence[float], out: Pixels) -> bool:
        """Pixels in memory that need neither a decoder nor a resampler: without the way through Pillow,
        whose calls cost more than the copy of a small image."""
        transform = self.transform
        if not isinstance(data, np.ndarray) or data.shape != out.shape:
            return False
        if not isinstance(transform, SquareTransform) or transform.flips(numbers):
            return False
        if not transform.is_square(data.shape[1], data.shape[0], numbers):
            return False
        out[...] = data
        transform.finish(numbers, out)
        return True

    def describe(self) -> str:
        workers = self.workers
        text = f"{workers} thread{'' if workers == 1 else 's'}" if workers else "no threads"
        notes = "; ".join(filter(None, self.notes))
        return f"{text} ({notes})" if notes else text


class HostBatch(BatchInProgress):
    """A batch in host memory."""

    def __init__(self, decoder: PillowDecoder, buffer: BatchBuffer) -> None:
        self._decoder = decoder
        self._buffer = buffer
        self.cuts = cut(len(buffer.labels), decoder.workers)

    def fill(self, chunk: Chunk) -> None:
        self._decoder.fill(chunk, self._buffer.images[chunk.rows])
        self._buffer.labels[chunk.rows] = self._decoder.source.labels[chunk.indices]

    def finish(self, dropped: Sequence[int]) -> Batch:
        return self._buffer.batch(dropped)
