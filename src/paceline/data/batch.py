"""`Batch`: the pixels and labels of one micro-batch, in host memory or already on the device."""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.chunk import CorruptSample


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
