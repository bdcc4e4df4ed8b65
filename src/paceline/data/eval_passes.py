"""`EvalPasses`: what all loaders of validation batches have in common.

In: a rank, a batch size, and a subclass's way to make a batch. Out: passes over this rank's samples:
rank, rank + world_size, … in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np

from paceline.data.batch import Batch
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.prefetch import Job, Prefetcher
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings

Unfilled = list[tuple[int, CorruptSample]]
EvalJob = Job[Unfilled, Batch]


def in_batch(firsts: Sequence[int], parts: Sequence[Unfilled]) -> Unfilled:
    """What each part of a batch left unfilled, by its row in the batch; `firsts` are the parts' own."""
    return [
        (first + row, sample)
        for first, part in zip(firsts, parts, strict=True)
        for row, sample in part
    ]


class EvalPasses(ABC):
    """Every `iter` is one pass. Corrupt samples are left out and listed once; a batch may be smaller
    for it, none is empty."""

    def __init__(
        self,
        samples: int,
        settings: DataSettings,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        workers: int,
    ) -> None:
        if not 0 <= rank < world_size or batch_size < 1:
            raise ValueError(f"rank {rank} of {world_size}, batches of {batch_size}")
        self._indices: Int64 = np.arange(rank, samples, world_size, dtype=np.int64)
        self._settings = settings
        self._batch_size = batch_size
        self._workers = workers
        self._log = CorruptLog(samples, settings.max_corrupt_share)
        self._passes: list[Prefetcher[Unfilled, Batch]] = []

    def __len__(self) -> int:
        """Samples of this rank, corrupt ones included."""
        return len(self._indices)

    def __iter__(self) -> Iterator[Batch]:
        prefetcher = Prefetcher(self._jobs(), self._workers, self._settings.prefetch_batches)
        self._passes.append(prefetcher)
        corrupt: tuple[CorruptSample, ...] = ()
        try:
            for batch in prefetcher:
                corrupt += batch.corrupt
                if len(batch):
                    yield Batch(batch.images, batch.labels, corrupt)
                    corrupt = ()
        finally:
            prefetcher.close()
            self._passes.remove(prefetcher)

    def _jobs(self) -> Iterator[EvalJob]:
        for start in range(0, len(self._indices), self._batch_size):
            yield self._job(self._indices[start : start + self._batch_size])

    @abstractmethod
    def _job(self, indices: Int64) -> EvalJob:
        """The batch of the samples `indices`, without the corrupt ones; it may be empty."""

    @abstractmethod
    def describe(self) -> str:
        """How the batches are made, for display."""

    def remark(self) -> str:
        """What a person should know after the pass; empty where there is nothing."""
        return ""

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples met so far, also those of a batch of which nothing was left."""
        return self._log.reported

    def close(self) -> None:
        """Stops passes that are still under way; the source stays open."""
        for prefetcher in list(self._passes):
            prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
