"""`SampleOrder`: the training order, one endless stream of concatenated epoch permutations.

In: the number of samples and a seed; for a shard-aware shuffle also the sizes of the shards. Out: for
any stretch of positions the epoch and the sample at each, found without walking there. Ranks play no
part: they only take different stretches.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import ConfigError
from paceline.data.randomness import ORDER_STREAM, Int64, hash64
from paceline.data.settings import DataSettings
from paceline.data.shard_shuffle import shard_permutation


@dataclass(frozen=True)
class ShardGroups:
    """Shuffle shards, then runs of `run` neighbours among `window` shards at a time."""

    sizes: tuple[int, ...]
    window: int
    run: int


class SampleOrder:
    """Position p holds sample `permutation(p // count)[p % count]`; safe to share among threads."""

    def __init__(
        self, count: int, seed: int, shuffle: bool = True, groups: ShardGroups | None = None
    ) -> None:
        """Without `groups` every order of the samples is as likely as any other."""
        if count < 1:
            raise ValueError(f"an order needs at least one sample, not {count}")
        if groups is not None and sum(groups.sizes) != count:
            raise ValueError(f"groups of {sum(groups.sizes)} samples for {count}")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self.groups = groups
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
        if self.groups is not None:
            groups = self.groups
            return shard_permutation(self.seed, epoch, groups.sizes, groups.window, groups.run)
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


def shard_groups(settings: DataSettings, sizes: Sequence[int] | None) -> ShardGroups | None:
    """What `data.shuffle` asks for; `sizes` of the source's shards, None where it has none."""
    if settings.shuffle == "global":
        return None
    if sizes is None:
        raise ConfigError(
            "data.shuffle",
            settings.shuffle,
            "the data is not in shards",
            "set data.shuffle = 'global', or make shards with paceline pack",
        )
    return ShardGroups(tuple(sizes), settings.shuffle_window_shards, settings.shuffle_run)
