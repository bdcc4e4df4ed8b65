"""`Batch` holds the images and labels of a micro-batch. `Chunk` is the part that one thread fills.

In training, a corrupt sample is replaced by its successor in the sample order. In evaluation, it is
left out. Every decoder uses `Chunk` for this, so all decoders give the same samples. Which image is
at an index of the batch does not depend on how samples are distributed among threads.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.errors import DataError
from paceline.data.image import CorruptSample, allowed_corrupt
from paceline.data.order import Int64, SampleOrder, uniform
from paceline.data.prefetch import Progress


@dataclass(frozen=True)
class Batch:
    """Images and labels of one micro-batch, in host memory or on the device.

    Attributes:
        images: uint8, samples × height × width × channels.
        labels: int64.
        corrupt: Corrupt samples found while the batch was made. Each is reported once.
        spent: Seconds spent on reading, decoding and augmenting, by name, summed over threads.
        begun: CUDA event that the training stream records before it computes parts of the batch.
            None on a CPU, or if the training stream only waits for a copy on another stream.
    """

    images: torch.Tensor
    labels: torch.Tensor
    corrupt: tuple[CorruptSample, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    begun: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> Batch:
        """Returns the batch in pinned memory. torch's DataLoader calls this method."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def mark_stream(device: torch.device) -> Any:
    """Records a CUDA event on the current stream and returns the event, or None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class BatchBuffer:
    """Host memory for one batch. Threads fill the memory through NumPy arrays."""

    def __init__(self, samples: int, image_size: int, channels: int, pin_memory: bool) -> None:
        shape = (samples, image_size, image_size, channels)
        if pin_memory:
            self._images = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:
            self._images = _PAGEABLE.take(shape, torch.uint8)
        self._labels = torch.empty(samples, dtype=torch.int64, pin_memory=pin_memory)
        self.images: npt.NDArray[np.uint8] = self._images.numpy()
        self.labels: npt.NDArray[np.int64] = self._labels.numpy()

    def batch(self, dropped: Sequence[int] = ()) -> Batch:
        """Returns the batch without the samples at the indices `dropped`."""
        kept = kept_rows(len(self._labels), dropped)
        if kept is None:
            return Batch(self._images, self._labels)
        return Batch(self._images[kept], self._labels[kept])


def kept_rows(samples: int, dropped: Sequence[int]) -> torch.Tensor | None:
    """Returns the indices of the batch that are not in `dropped`, or None if `dropped` is empty."""
    if not dropped:
        return None
    kept = torch.ones(samples, dtype=torch.bool)
    kept[list(dropped)] = False
    return torch.nonzero(kept).flatten()


def _references_of_unused() -> int:
    """Returns the result of `sys.getrefcount` for an unused block of memory in a loop over a list."""
    blocks = [np.empty(0, dtype=np.uint8)]
    for block in blocks:
        return sys.getrefcount(block)
    raise AssertionError


_UNUSED = _references_of_unused()


class ReusedMemory:
    """A memory pool that reuses the memory of released batches.

    New memory costs a page fault for every 4 KiB, which takes as long as filling a batch.
    Thread-safe. Keeps at most `keep` blocks of each size.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._blocks: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor with undefined content, in reused memory if a block is unused.

        Tensors, views, and tensors saved by autograd hold references to the underlying array. A
        block is unused if only the pool's own reference remains.
        """
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            blocks = self._blocks[size]
            for block in blocks:
                if sys.getrefcount(block) == _UNUSED:
                    return torch.from_numpy(block).view(dtype).view(shape)
            block = np.empty(size, dtype=np.uint8)
            if len(blocks) < self._keep:
                blocks.append(block)
            return torch.from_numpy(block).view(dtype).view(shape)


# For pageable images only: torch caches pinned memory itself. A loader prefetches fewer batches
# than this.
_PAGEABLE = ReusedMemory(16)


class CorruptLog:
    """Records the corrupt samples of one loader. Threads add samples, and the consumer reports them."""

    def __init__(self, samples: int, share: float, known: Iterable[CorruptSample] = ()) -> None:
        """Creates a log.

        Args:
            samples: Number of samples of the loader.
            share: Fraction of the samples that may be corrupt.
            known: Samples that are known to be corrupt before the first batch.
        """
        self.limit = allowed_corrupt(share, samples)
        self._samples = samples
        self._known = {sample.index: sample for sample in known}
        self._reported: dict[int, CorruptSample] = {}

    def known(self, index: int) -> CorruptSample | None:
        return self._known.get(index)

    @property
    def any_known(self) -> bool:
        return bool(self._known)

    def add(self, sample: CorruptSample) -> None:
        self._known.setdefault(sample.index, sample)

    def report(self, met: Iterable[CorruptSample]) -> tuple[CorruptSample, ...]:
        """Returns the samples of `met` that were not reported before, and marks them as reported.

        The consumer calls this method once per batch, so the result does not depend on prefetching.

        Raises:
            DataError: If more samples are corrupt than allowed, or all samples are.
        """
        new = {s.index: s for s in met if s.index not in self._reported}
        self._reported.update(new)
        if len(self._reported) > self.limit or len(self._reported) == self._samples:
            raise self.error(self._reported.values())
        return tuple(new.values())

    @property
    def reported(self) -> tuple[CorruptSample, ...]:
        return tuple(self._reported.values())

    def error(self, samples: Iterable[CorruptSample]) -> DataError:
        """Returns an error with the number of `samples` and the name of the first one."""
        corrupt = list(samples)
        return DataError(
            f"{len(corrupt)} corrupt of {self._samples} samples (allowed: {self.limit}); the first: "
            f"{corrupt[0].name}: {corrupt[0].reason}",
            "fix the data, or raise data.max_corrupt_share",
        )


class Chunk:
    """The part of a batch that one thread fills: consecutive samples and their random numbers.

    A row is a position in the batch. `indices` has the sample of each row, and `numbers` its random
    numbers for augmentation. Both change if a corrupt sample is replaced. `wanted` contains the
    original samples. A chunk is used by one thread only.
    """

    def __init__(
        self,
        first: int,
        indices: Int64,
        numbers: npt.NDArray[np.float64],
        log: CorruptLog,
        progress: Progress,
        order: SampleOrder | None = None,
        position: int = 0,
    ) -> None:
        """Creates a chunk.

        Args:
            first: Index of the first row in the batch.
            indices: Sample index of each row.
            numbers: Random numbers for augmentation, rows × draws.
            log: Receives corrupt samples.
            progress: Receives the seconds spent on reading, decoding and augmenting.
            order: The sample order, from which replacements of corrupt samples are taken. With
                None, corrupt samples are left out.
            position: Position in `order` of the sample in the first row.
        """
        self.first = first
        self.wanted = indices.tolist()
        self.indices = indices
        self.numbers = numbers
        self.progress = progress
        self._log = log
        self._order = order
        self._positions = list(range(position, position + len(indices)))
        self._met: dict[int, dict[int, CorruptSample]] = {}

    @classmethod
    def of_stream(
        cls,
        order: SampleOrder,
        start: int,
        rows: tuple[int, int],
        draws: int,
        log: CorruptLog,
        progress: Progress,
    ) -> Chunk:
        """Returns the chunk for `rows` of the training batch at position `start` of the order."""
        position, stop = start + rows[0], start + rows[1]
        epochs, indices = order.at(position, stop)
        numbers = uniform(order.seed, epochs, indices, draws)
        return cls(rows[0], indices, numbers, log, progress, order, position)

    @classmethod
    def of_indices(
        cls, indices: Int64, rows: tuple[int, int], log: CorruptLog, progress: Progress
    ) -> Chunk:
        """Returns the chunk for `rows` of the evaluation batch with the samples `indices`."""
        here = indices[slice(*rows)].copy()
        return cls(rows[0], here, np.empty((len(here), 0)), log, progress)

    def __len__(self) -> int:
        return len(self.wanted)

    @property
    def rows(self) -> slice:
        """The rows (positions in the batch) that the chunk fills."""
        return slice(self.first, self.first + len(self))

    @property
    def corrupt(self) -> list[CorruptSample]:
        """The corrupt samples of the chunk, in sample order."""
        return [sample for _, met in sorted(self._met.items()) for sample in met.values()]

    @property
    def dropped(self) -> list[int]:
        """The rows of the batch that are left out."""
        return [] if self._order is not None else [self.first + row for row in sorted(self._met)]

    def is_dropped(self, row: int) -> bool:
        return self._order is None and row in self._met

    def replace_known(self, rows: Iterable[int] | None = None) -> None:
        """Replaces or drops samples already known to be corrupt, in `rows` or else in all rows."""
        if not self._log.any_known:
            return
        for row in range(len(self)) if rows is None else rows:
            known = self._log.known(int(self.indices[row]))
            if known is not None and not self.is_dropped(row):
                self.replace(row, known)

    def replace(self, row: int, sample: CorruptSample) -> None:
        """Replaces the corrupt `sample` in `row` by the next good sample in the order.

        Skips samples that are known to be corrupt. In evaluation, drops the row instead.

        Raises:
            DataError: If more samples are corrupt than allowed.
        """
        met = self._met.setdefault(row, {})
        corrupt: CorruptSample | None = sample
        while corrupt is not None:
            self._log.add(corrupt)
            met[corrupt.index] = corrupt
            if self._order is None:
                return
            if len(met) > self._log.limit or len(met) >= self._order.count:
                raise self._log.error(met.values())
            self.progress.check()
            self._positions[row] += 1
            position = self._positions[row]
            epochs, indices = self._order.at(position, position + 1)
            self.indices[row] = indices[0]
            draws = self.numbers.shape[1]
            self.numbers[row] = uniform(self._order.seed, epochs, indices, draws)[0]
            corrupt = self._log.known(int(indices[0]))
