"""`TrainLoader` and `EvalLoader`: prefetched batches, made by any decoder.

The batches depend on the sample order, the plan and the decoder, never on the number or timing of
the threads. A loader that starts at step s gives the same batches as a loader that has reached step
s.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from paceline.data.batch import Batch, Chunk, CorruptLog
from paceline.data.decode.decoder import BatchInProgress, Decoder
from paceline.data.image import CorruptSample
from paceline.data.order import BatchPlan, Int64, SampleOrder
from paceline.data.prefetch import Closing, Job, Prefetcher, Progress

# Number of micro-batches to prefetch.
PREFETCH_BATCHES = 4

_Job = Job[Chunk, Batch]
# Type that identifies the samples of a batch: a position in the sample order, or an array of indices.
Samples = TypeVar("Samples")


class _Loader(Protocol):
    """The common interface of training and evaluation loaders. Benchmarks and tests implement it, too."""

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples found so far, each once, in the order of the batches."""

    def describe(self) -> str:
        """Describes how batches are made, for example by which decoder."""

    def note(self) -> str:
        """Returns a note to print at the end of the run, or ""."""

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...


class TrainBatches(_Loader, Protocol):
    """The interface of a training loader: iterates once over this rank's micro-batches of the run."""

    def __next__(self) -> Batch: ...


@runtime_checkable
class EvalBatches(_Loader, Protocol):
    """The interface of an evaluation loader. Each iteration is one pass over this rank's samples.

    `len` is the number of samples of this rank, including corrupt ones.
    """

    def __len__(self) -> int: ...


class _Base(Closing, Generic[Samples]):
    """Base class of both loaders, which prefetches batches.

    `next` raises DataError if storage fails, or if more samples of this rank are corrupt than
    `max_corrupt_share` allows.
    """

    def __init__(
        self, decoder: Decoder, samples: int, prefetch_batches: int, max_corrupt_share: float
    ) -> None:
        self._decoder = decoder
        self._depth = prefetch_batches
        self._log = CorruptLog(samples, max_corrupt_share, decoder.corrupt)

    def _prefetcher(self, jobs: Iterator[_Job]) -> Prefetcher[Chunk, Batch]:
        return Prefetcher(jobs, self._decoder.workers, self._depth)

    def _job(self, count: int, samples: Samples) -> _Job:
        """Returns the work of making one batch. Only the result refers to the batch, for memory reuse."""
        batch = self._decoder.begin(count)
        chunks = [partial(self._fill, batch, samples, rows) for rows in batch.cuts]
        return Job(chunks, partial(self._finish, batch), batch.complete)

    @abstractmethod
    def _fill(
        self, batch: BatchInProgress, samples: Samples, rows: tuple[int, int], progress: Progress
    ) -> Chunk:
        """Decodes the samples of `rows`, a part of the batch, and returns that part."""

    def _finish(self, batch: BatchInProgress, chunks: list[Chunk]) -> Batch:
        corrupt = self._log.report(sample for chunk in chunks for sample in chunk.corrupt)
        dropped = [row for chunk in chunks for row in chunk.dropped]
        return replace(batch.finish(dropped), corrupt=corrupt)

    def describe(self) -> str:
        return self._decoder.describe()

    def note(self) -> str:
        return self._decoder.note()

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        return self._log.reported


class TrainLoader(_Base[int]):
    """Iterates over this rank's micro-batches in order, from `first_step` to the end of the run.

    If `rank` is a sequence, the loader yields the micro-batches of all these ranks in each step,
    one rank after the other.
    """

    def __init__(
        self,
        decoder: Decoder,
        order: SampleOrder,
        plan: BatchPlan,
        *,
        rank: int | Sequence[int],
        first_step: int = 0,
        prefetch_batches: int = PREFETCH_BATCHES,
        max_corrupt_share: float = 0.01,
    ) -> None:
        super().__init__(decoder, order.count, prefetch_batches, max_corrupt_share)
        if plan.samples != order.count:
            raise ValueError(f"a plan for {plan.samples} samples, but an order of {order.count}")
        self._order = order
        self._plan = plan
        ranks = (rank,) if isinstance(rank, int) else tuple(rank)
        self._batches = self._prefetcher(self._jobs(ranks, first_step))

    def _jobs(self, ranks: Sequence[int], first_step: int) -> Iterator[_Job]:
        for step in range(first_step, self._plan.total_steps):
            for rank in ranks:
                for start, stop in self._plan.micro_batches(step, rank):
                    yield self._job(stop - start, start)

    def _fill(
        self, batch: BatchInProgress, start: int, rows: tuple[int, int], progress: Progress
    ) -> Chunk:
        chunk = Chunk.of_stream(self._order, start, rows, self._decoder.draws, self._log, progress)
        batch.fill(chunk)
        return chunk

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return replace(next(self._batches), spent=self._batches.spent)

    def close(self) -> None:
        """Stops the threads. The source stays open."""
        self._batches.close()


class EvalLoader(_Base[Int64]):
    """Iterates over batches of the samples rank, rank + world_size, rank + 2 · world_size, …

    Each iteration is one pass. Corrupt samples are left out and reported once. No batch is empty.
    """

    def __init__(
        self,
        decoder: Decoder,
        samples: int,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        prefetch_batches: int = PREFETCH_BATCHES,
        max_corrupt_share: float = 0.01,
    ) -> None:
        super().__init__(decoder, samples, prefetch_batches, max_corrupt_share)
        if not 0 <= rank < world_size or batch_size < 1:
            raise ValueError(f"rank {rank} of {world_size}, batch_size {batch_size}: out of range")
        self._indices: Int64 = np.arange(rank, samples, world_size, dtype=np.int64)
        self._batch_size = batch_size
        self._passes: list[Prefetcher[Chunk, Batch]] = []

    def __len__(self) -> int:
        """Returns the number of samples of this rank, including corrupt ones."""
        return len(self._indices)

    def __iter__(self) -> Iterator[Batch]:
        batches = self._prefetcher(self._jobs())
        self._passes.append(batches)
        corrupt: tuple[CorruptSample, ...] = ()
        try:
            for batch in batches:
                corrupt += batch.corrupt
                if len(batch):
                    yield replace(batch, corrupt=corrupt)
                    corrupt = ()
        finally:
            batches.close()
            self._passes.remove(batches)

    def _jobs(self) -> Iterator[_Job]:
        for start in range(0, len(self._indices), self._batch_size):
            indices = self._indices[start : start + self._batch_size]
            yield self._job(len(indices), indices)

    def _fill(
        self, batch: BatchInProgress, indices: Int64, rows: tuple[int, int], progress: Progress
    ) -> Chunk:
        chunk = Chunk.of_indices(indices, rows, self._log, progress)
        batch.fill(chunk)
        return chunk

    def close(self) -> None:
        """Stops unfinished passes. The source stays open."""
        for batches in list(self._passes):
            batches.close()
