"""`Batch`: the pixels and labels of one micro-batch, in host memory or already on the device; `Chunk`:
some of its rows while a thread fills them, and what happens to corrupt samples.

In training, a corrupt sample is replaced by its successor in the stream; in evaluation it is left
out. Every decoder asks the chunk, so all of them give the same samples. What lies in a row is a
function of its position alone, however the rows are shared among threads.
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
    """`images` is uint8, samples × height × width × channels; `labels` is int64. `corrupt` are the
    samples found corrupt on the way, each reported once. `spent` is the time that making the batch
    took, in seconds by stage, over all threads. `begun` is an event on the consumer's stream, after
    which the stream itself works on the batch; None where it only waits for other streams."""

    images: torch.Tensor
    labels: torch.Tensor
    corrupt: tuple[CorruptSample, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    begun: Any = None

    def __len__(self) -> int:
        return len(self.labels)

    def pin_memory(self) -> Batch:
        """For torch's DataLoader, which leaves alone what has no such method."""
        return replace(self, images=self.images.pin_memory(), labels=self.labels.pin_memory())


def mark_stream(device: torch.device) -> Any:
    """An event behind all that the current stream was given so far; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class BatchBuffer:
    """Memory for one batch, that threads fill through its NumPy side; pinned where asked for."""

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
        """The filled batch, without the rows `dropped`."""
        kept = kept_rows(len(self._labels), dropped)
        if kept is None:
            return Batch(self._images, self._labels)
        return Batch(self._images[kept], self._labels[kept])


def kept_rows(samples: int, dropped: Sequence[int]) -> torch.Tensor | None:
    """The rows of a batch that are not `dropped`; None where that is all of them."""
    if not dropped:
        return None
    kept = torch.ones(samples, dtype=torch.bool)
    kept[list(dropped)] = False
    return torch.nonzero(kept).flatten()


def _references_of_unused() -> int:
    """What `getrefcount` says of a block that only the list below holds, whatever the interpreter."""
    blocks = [np.empty(0, dtype=np.uint8)]
    for block in blocks:
        return sys.getrefcount(block)
    raise AssertionError


_UNUSED = _references_of_unused()


class ReusedMemory:
    """Memory of batches that are gone, for the next ones: new memory costs a page fault for every 4
    KiB, which at the size of a batch takes as long as filling it.

    Safe to share among threads. Keeps up to `keep` blocks of a size, and no more than the most that
    were in use at once.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._blocks: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Its content is whatever was there before.

        A tensor, and every view of it, and whatever autograd saved of it, holds a reference to the
        array below it: when only our own is left, nobody can see the memory any more.
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


# Pageable images only: torch itself keeps pinned memory. A few more than a loader has ready.
_PAGEABLE = ReusedMemory(16)


class CorruptLog:
    """The corrupt samples of one loader. Threads add to what is known; only the consumer reports."""

    def __init__(self, samples: int, share: float, known: Iterable[CorruptSample] = ()) -> None:
        """Of `samples`, `allowed_corrupt(share, samples)` may be corrupt. `known` are known
        beforehand."""
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
        """Those of `met` not reported before; DataError where there are more than allowed. The
        consumer asks batch by batch, so the order in which batches are made ahead does not show."""
        new = {s.index: s for s in met if s.index not in self._reported}
        self._reported.update(new)
        if len(self._reported) > self.limit or len(self._reported) == self._samples:
            raise self.error(self._reported.values())
        return tuple(new.values())

    @property
    def reported(self) -> tuple[CorruptSample, ...]:
        return tuple(self._reported.values())

    def error(self, samples: Iterable[CorruptSample]) -> DataError:
        """Names the first of `samples`; the count tells a stray file from a broken data set."""
        found = list(samples)
        return DataError(
            f"{len(found)} corrupt of {self._samples} samples (allowed: {self.limit}); the first: "
            f"{found[0].name}: {found[0].reason}",
            "fix the data, or raise data.max_corrupt_share",
        )


class Chunk:
    """Rows of a batch, from `first` on: the sample of each, and its uniform numbers for
    augmentation.

    `indices` and `numbers` change when a sample turns out to be corrupt; `wanted` are the samples
    that the rows began with. Used by one thread.
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
        """`position` is that of the first row in `order`; without an order corrupt samples are left
        out."""
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
        """The `rows` of the batch that begins at position `start` of the training order."""
        position, stop = start + rows[0], start + rows[1]
        epochs, indices = order.at(position, stop)
        numbers = uniform(order.seed, epochs, indices, draws)
        return cls(rows[0], indices, numbers, log, progress, order, position)

    @classmethod
    def of_indices(
        cls, indices: Int64, rows: tuple[int, int], log: CorruptLog, progress: Progress
    ) -> Chunk:
        """The `rows` of an evaluation batch of these samples; there is no chance in evaluation."""
        here = indices[slice(*rows)].copy()
        return cls(rows[0], here, np.empty((len(here), 0)), log, progress)

    def __len__(self) -> int:
        return len(self.wanted)

    @property
    def rows(self) -> slice:
        """Where in the batch the chunk lies."""
        return slice(self.first, self.first + len(self))

    @property
    def corrupt(self) -> list[CorruptSample]:
        """The corrupt samples met, in the order of the stream."""
        return [sample for _, met in sorted(self._met.items()) for sample in met.values()]

    @property
    def dropped(self) -> list[int]:
        """Rows of the batch that are to be left out."""
        return [] if self._order is not None else [self.first + row for row in sorted(self._met)]

    def is_dropped(self, row: int) -> bool:
        return self._order is None and row in self._met

    def replace_known(self, rows: Iterable[int] | None = None) -> None:
        """Replaces samples that are known to be corrupt, in all rows unless some are named."""
        if not self._log.any_known:
            return
        for row in range(len(self)) if rows is None else rows:
            known = self._log.known(int(self.indices[row]))
            if known is not None and not self.is_dropped(row):
                self.replace(row, known)

    def replace(self, row: int, sample: CorruptSample) -> None:
        """Puts the next sample of the stream that is not known to be corrupt into `row`; without an
        order the row is left out. DataError once more are corrupt than allowed, or all of them."""
        met = self._met.setdefault(row, {})
        found: CorruptSample | None = sample
        while found is not None:
            self._log.add(found)
            met[found.index] = found
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
            found = self._log.known(int(indices[0]))
