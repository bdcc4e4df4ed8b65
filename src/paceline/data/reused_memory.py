"""`ReusedMemory`: memory of batches that have gone, for the next ones.

In: a shape and a dtype. Out: a tensor of that shape whose memory, where it can be, is that of an earlier
one that nobody holds any more. New memory costs a page fault for every 4 KiB, which at a batch's size
is as much time as filling it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch


def _references_of_unused() -> int:
    """What `getrefcount` says of a block that only the list below holds, whatever the interpreter."""
    blocks = [np.empty(0, dtype=np.uint8)]
    for block in blocks:
        return sys.getrefcount(block)
    raise AssertionError


_UNUSED = _references_of_unused()


class ReusedMemory:
    """Safe to share among threads. Keeps up to `keep` blocks of a size, and no more than the most that
    were in use at once."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._blocks: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Its content is whatever was there before.

        A tensor, and every view of it, and whatever autograd saved of it, holds a reference to the array
        below it: when only our own is left, nobody can see the memory any more.
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
