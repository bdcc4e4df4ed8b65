"""`TrainStream`: what all loaders of training batches have in common.

In: a plan, a rank, and a subclass's way to make a micro-batch. Out: this rank's micro-batches in order,
made ahead of their use. A stream from step s on gives what one from the beginning gives from step s on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from paceline.data.batch import Batch
from paceline.data.batch_plan import BatchPlan
from paceline.data.cause_clock import CauseClock
from paceline.data.corrupt import CorruptLog, CorruptSample
from paceline.data.order import SampleOrder, shard_groups
from paceline.data.prefetch import Job, Prefetcher
from paceline.data.settings import DataSettings

TrainJob = Job[list[CorruptSample], Batch]


class TrainStream(ABC):
    """DataError comes out of `next` where more samples are corrupt than `max_corrupt_share` allows
    among those that this rank met."""

    def __init__(
        self,
        samples: int,
        plan: BatchPlan,
        settings: DataSettings,
        *,
        seed: int,
        rank: int,
        first_step: int,
        workers: int,
        groups: Sequence[int] | None = None,
    ) -> None:
        if plan.samples != samples:
            raise ValueError(f"a plan for {plan.samples} samples, a source of {samples}")
        self._plan = plan
        self._settings = settings
        self._rank = rank
        self._first_step = first_step
        self._order = SampleOrder(samples, seed, groups=shard_groups(settings, groups))
        self._log = CorruptLog(samples, settings.max_corrupt_share)
        self._clock = CauseClock()
        self._prefetcher = Prefetcher(self._jobs(), workers, settings.prefetch_batches, self._clock)

    def _jobs(self) -> Iterator[TrainJob]:
        for step in range(self._first_step, self._plan.total_steps):
            for start, stop in self._plan.micro_batches(step, self._rank):
                yield self._job(start, stop)

    @abstractmethod
    def _job(self, start: int, stop: int) -> TrainJob:
        """The micro-batch of the positions `start` to `stop`."""

    @abstractmethod
    def describe(self) -> str:
        """How the batches are made, for display."""

    def remark(self) -> str:
        """What a person should know at the end of the run; empty where there is nothing."""
        return ""

    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples reported so far, in the order of the stream."""
        return self._log.reported

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._prefetcher)
        return replace(batch, spent=self._prefetcher.spent)

    def close(self) -> None:
        """Stops the threads, also in the middle; the source stays open."""
        self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
