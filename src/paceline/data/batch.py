"""`Batch`: what a loader hands over.

In: nothing; it is a record. Out: pixels and labels of one micro-batch, in host memory or already on the
device, and the corrupt samples met for the first time on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.data.corrupt import CorruptSample
from paceline.data.reused_memory import ReusedMemory

# Pageable images only: torch itself keeps pinned memory for the next batch. As many as a loader may have
# ready, and some.
_IMAGES = ReusedMemory(16)

__all__ = ["Batch", "BatchBuffer", "CorruptSample"]


@dataclass(frozen=True)
class Batch:
    """`images` is uint8, samples × height × width × channels; `labels` is int64. `spent`: what making it
    took, in seconds by cause, over all threads. `begun`: a mark on the consumer's stream, behind which
    lies work of its own that makes the batch; None where it only waits for others."""

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
            self._images = _IMAGES.take(shape, torch.uint8)
        self._labels = torch.empty(samples, dtype=torch.int64, pin_memory=pin_memory)
        self.images: npt.NDArray[np.uint8] = self._images.numpy()
        self.labels: npt.NDArray[np.int64] = self._labels.numpy()

    def batch(self, corrupt: tuple[CorruptSample, ...], dropped: Sequence[int] = ()) -> Batch:
        """The filled batch, without the rows `dropped`."""
        if not dropped:
            return Batch(self._images, self._labels, corrupt)
        kept = torch.ones(len(self._labels), dtype=torch.bool)
        kept[list(dropped)] = False
        return Batch(self._images[kept], self._labels[kept], corrupt)
