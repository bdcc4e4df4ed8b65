"""`Decoder`, the interface that makes batches of images; `PillowDecoder`, which uses Pillow.

A loader calls `Decoder.begin` to start a batch, fills its chunks (parts of the batch) in threads,
and calls `finish` in the thread that takes the batch. All decoders give the same samples, crop
boxes and flips. All decoders on the host also give the same pixels and errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from time import perf_counter

import numpy as np

from paceline.core.errors import PacelineError
from paceline.data.augment import Pixels, SquareTransform
from paceline.data.batch import Batch, BatchBuffer, Chunk
from paceline.data.image import CorruptImage, CorruptSample, decode
from paceline.data.prefetch import Progress, cut
from paceline.data.sources.base import Source, Stored


class RegionUnavailableError(PacelineError):
    """Raised if the C library that decodes crops of JPEGs is not available, with cause and remedy."""


class BatchInProgress(ABC):
    """A batch that threads are filling.

    Attributes:
        cuts: Index of the first sample of each chunk, and the index after its last sample.
    """

    cuts: Sequence[tuple[int, int]]

    @abstractmethod
    def fill(self, chunk: Chunk) -> None:
        """Fills the part `chunk` of the batch, in any thread. Raises DataError if storage fails."""

    def complete(self) -> None:  # noqa: B027  (optional step)
        """Runs after all parts of the batch are filled, in the thread that filled the last one."""

    @abstractmethod
    def finish(self, dropped: Sequence[int]) -> Batch:
        """Returns the batch without the samples at the indices `dropped`. Called after `complete`."""


class Decoder(ABC):
    """Makes batches of images. Thread-safe.

    Attributes:
        draws: Number of random numbers that the augmentation of a sample uses.
        workers: Number of threads that decode. With 0, the consumer's thread decodes.
        corrupt: Samples that are known to be corrupt before the first batch.
    """

    draws: int
    workers: int
    corrupt: Sequence[CorruptSample] = ()

    @abstractmethod
    def begin(self, samples: int) -> BatchInProgress:
        """Allocates a batch of `samples` samples. Runs in the consumer's thread."""

    @abstractmethod
    def describe(self) -> str:
        """Describes how batches are made, for example `resident on cuda:0, 146 MiB` or `2 threads`."""

    def note(self) -> str:
        """Describes how many samples a slower decoder had to decode, or returns "" if there are none."""
        return ""


def describe_threads(workers: int, notes: Sequence[str]) -> str:
    """Returns `workers` as text, followed by the non-empty notes in parentheses."""
    text = f"{workers} thread{'' if workers == 1 else 's'}" if workers else "no threads"
    joined = "; ".join(filter(None, notes))
    return f"{text} ({joined})" if joined else text


@dataclass(eq=False)
class PillowDecoder(Decoder):
    """Decodes whole images with Pillow in host memory, then augments them.

    Attributes:
        source: The samples.
        transform: Converts a decoded image to the square of pixels.
        channels: 1 for grayscale, 3 for RGB.
        workers: Number of threads.
        pin_memory: Allocates batches in pinned memory.
        notes: Added to the text of `describe`.
    """

    source: Source
    transform: SquareTransform
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
        """Fills `out` (samples × height × width × channels) with the images of a part of a batch."""
        chunk.replace_known()
        filled = set(self.fill_together(chunk, out)) if len(chunk) > 1 else ()
        for row in range(len(chunk)):
            if row not in filled:
                chunk.progress.check()
                self.fill_row(chunk, row, out[row])

    def fill_together(self, chunk: Chunk, out: Pixels) -> Sequence[int]:
        """Decodes several samples with one call if the decoder can, and returns their rows in `chunk`.

        `fill` decodes the remaining rows one by one.
        """
        return ()

    def fill_row(self, chunk: Chunk, row: int, out: Pixels) -> None:
        """Decodes the sample of one row into `out`.

        If the sample is corrupt, uses the next one in the order, or drops the row.
        """
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
        """Decodes and augments one sample into `out`.

        After a CorruptImage, the content of `out` is undefined.
        """
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
        """Copies a sample that is stored as pixels and needs no resampling and no flip.

        For small images, calls of Pillow cost more than the copy.

        Returns:
            False if the sample must be decoded, resampled or flipped. `out` is then unchanged.
        """
        transform = self.transform
        if not isinstance(data, np.ndarray) or data.shape != out.shape:
            return False
        if transform.flips(numbers):
            return False
        if not transform.is_square(data.shape[1], data.shape[0], numbers):
            return False
        out[...] = data
        transform.finish(numbers, out)
        return True

    def describe(self) -> str:
        return describe_threads(self.workers, self.notes)


class HostBatch(BatchInProgress):
    """A batch that is filled in host memory."""

    def __init__(self, decoder: PillowDecoder, buffer: BatchBuffer) -> None:
        self._decoder = decoder
        self._buffer = buffer
        self.cuts = cut(len(buffer.labels), decoder.workers)

    def fill(self, chunk: Chunk) -> None:
        self._decoder.fill(chunk, self._buffer.images[chunk.rows])
        self._buffer.labels[chunk.rows] = self._decoder.source.labels[chunk.indices]

    def finish(self, dropped: Sequence[int]) -> Batch:
        return self._buffer.batch(dropped)
