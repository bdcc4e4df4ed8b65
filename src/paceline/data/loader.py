"""`TrainLoader` and `EvalLoader`: batches, prepared in the background.

In: a source, the settings, and which rank this is. Out: batches of pixels in host memory. What they hold
depends on the plan and the seed alone, never on the number of threads or on their timing, and a loader
that starts at step s gives what one from the beginning gives from step s on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from paceline.data.augment import EvalTransform, TrainTransform
from paceline.data.batch import Batch, BatchBuffer
from paceline.data.batch_plan import BatchPlan
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.order import SampleOrder
from paceline.data.prefetch import Job, Prefetcher, cut
from paceline.data.randomness import Int64
from paceline.data.sample_reader import SampleReader
from paceline.data.settings import DataSettings
from paceline.data.source import Source

TrainJob = Job[list[CorruptSample], Batch]
EvalJob = Job[list[tuple[int, CorruptSample]], Batch]


class TrainLoader:
    """This rank's micro-batches in order, from `first_step` to the end of the run.

    DataError comes out of `next` where storage fails, or where more samples are corrupt than
    `max_corrupt_share` allows among those that this rank met.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        settings: DataSettings,
        *,
        seed: int,
        rank: int,
        first_step: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if plan.samples != len(source):
            raise ValueError(f"a plan for {plan.samples} samples, a source of {len(source)}")
        self._plan = plan
        self._settings = settings
        self._rank = rank
        self._first_step = first_step
        self._pin_memory = pin_memory
        self._order = SampleOrder(len(source), seed)
        self._log = CorruptLog(len(source), settings.max_corrupt_share)
        self._reader = SampleReader(source, TrainTransform(settings), settings.channels, self._log)
        self._prefetcher = Prefetcher(self._jobs(), settings.workers, settings.prefetch_batches)

    def _jobs(self) -> Iterator[TrainJob]:
        for step in range(self._first_step, self._plan.total_steps):
            for start, stop in self._plan.micro_batches(step, self._rank):
                yield self._job(start, stop)

    def _job(self, start: int, stop: int) -> TrainJob:
        settings = self._settings
        buffer = BatchBuffer(stop - start, settings.image_size, settings.channels, self._pin_memory)
        chunks = [
            partial(
                self._reader.fill_stream,
                self._order,
                start + first,
                buffer.images[first:last],
                buffer.labels[first:last],
            )
            for first, last in cut(stop - start, settings.workers)
        ]
        return Job(chunks, partial(self._finish, buffer))

    def _finish(self, buffer: BatchBuffer, parts: list[list[CorruptSample]]) -> Batch:
        return buffer.batch(self._log.report(sample for part in parts for sample in part))

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples reported so far, in the order of the stream."""
        return self._log.reported

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._prefetcher)

    def close(self) -> None:
        """Stops the threads, also in the middle; the source stays open."""
        self._prefetcher.close()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


class EvalLoader:
    """Every `iter` is one pass over this rank's samples: rank, rank + world_size, … in order.

    Corrupt samples are left out and listed once; a batch may be smaller for it, none is empty.
    """

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < world_size or batch_size < 1:
            raise ValueError(f"rank {rank} of {world_size}, batches of {batch_size}")
        self._indices: Int64 = np.arange(rank, len(source), world_size, dtype=np.int64)
        self._settings = settings
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self._log = CorruptLog(len(source), settings.max_corrupt_share)
        self._reader = SampleReader(source, EvalTransform(settings), settings.channels, self._log)
        self._passes: list[Prefetcher[list[tuple[int, CorruptSample]], Batch]] = []

    def __len__(self) -> int:
        """Samples of this rank, corrupt ones included."""
        return len(self._indices)

    def __iter__(self) -> Iterator[Batch]:
        settings = self._settings
        prefetcher = Prefetcher(self._jobs(), settings.workers, settings.prefetch_batches)
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

    def _job(self, indices: Int64) -> EvalJob:
        settings = self._settings
        buffer = BatchBuffer(len(indices), settings.image_size, settings.channels, self._pin_memory)
        cuts = cut(len(indices), settings.workers)
        chunks = [
            partial(
                self._reader.fill_indices,
                indices[first:last],
                buffer.images[first:last],
                buffer.labels[first:last],
            )
            for first, last in cuts
        ]
        return Job(chunks, partial(self._finish, buffer, [first for first, _ in cuts]))

    def _finish(
        self,
        buffer: BatchBuffer,
        firsts: list[int],
        parts: list[list[tuple[int, CorruptSample]]],
    ) -> Batch:
        unfilled = [
            (first + row, sample)
            for first, part in zip(firsts, parts, strict=True)
            for row, sample in part
        ]
        corrupt = self._log.report(sample for _, sample in unfilled)
        return buffer.batch(corrupt, [row for row, _ in unfilled])

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples met so far, also those of a batch of which nothing was left."""
        return self._log.reported

    def close(self) -> None:
        """Stops passes that are still under way; the source stays open."""
        for prefetcher in list(self._passes):
            prefetcher.close()

    def __enter__(self) -> EvalLoader:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
