"""`SampleOrder`: the training order, one endless stream of concatenated epoch permutations.

In: the number of samples and a seed. Out: for any stretch of positions the epoch and the sample at
each, found without walking there. Ranks play no part: they only take different stretches.
"""

from __future__ import annotations

import threading

import numpy as np

from paceline.data.randomness import ORDER_STREAM, Int64, hash64


class SampleOrder:
    """Position p holds sample `permutation(p // count)[p % count]`; safe to share among threads."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ValueError(f"an order needs at least one sample, not {count}")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self._lock = threading.Lock()
        self._recent: dict[int, Int64] = {}

    def permutation(self, epoch: int) -> Int64:
        """The samples of `epoch`, each exactly once: sorted by their hash. Do not write to it."""
        if not self.shuffle:
            epoch = 0
        with self._lock:
            if epoch not in self._recent:
                # A batch may span an epoch's end, and prefetching runs ahead: two are in use.
                while len(self._recent) > 1:
                    del self._recent[next(iter(self._recent))]
                self._recent[epoch] = self._build(epoch)
            return self._recent[epoch]

    def _build(self, epoch: int) -> Int64:
        indices = np.arange(self.count, dtype=np.int64)
        if not self.shuffle:
            return indices
        return np.argsort(hash64(self.seed, ORDER_STREAM, epoch, indices), kind="stable")

    def at(self, start: int, stop: int) -> tuple[Int64, Int64]:
        """Epochs and sample indices of the positions `start` to `stop`."""
        if not 0 <= start <= stop:
            raise ValueError(f"no such stretch of the stream: {start} to {stop}")
        positions = np.arange(start, stop, dtype=np.int64)
        epochs = positions // self.count
        pieces = [np.empty(0, dtype=np.int64)]
        for epoch in range(start // self.count, -(-stop // self.count)):
            first = epoch * self.count
            piece = self.permutation(epoch)[max(start - first, 0) : stop - first]
            pieces.append(piece)
        return epochs, np.concatenate(pieces)
