"""`TrainLoader` and `EvalLoader`: batches decoded and augmented by threads, in the background.

In: a source, the settings, and which rank this is. Out: batches of pixels in host memory. What they hold
depends on the plan and the seed alone, never on the number of threads or on their timing.
"""

from __future__ import annotations

from functools import partial

from paceline.data.augmentation.augment import EvalTransform, TrainTransform
from paceline.data.batch import Batch, BatchBuffer
from paceline.data.batch_plan import BatchPlan
from paceline.data.corrupt import CorruptSample
from paceline.data.decoding.create_preparer import create_preparer
from paceline.data.eval_passes import EvalJob, EvalPasses, Unfilled, in_batch
from paceline.data.prefetch import Job, cut
from paceline.data.randomness import Int64
from paceline.data.sample_reader import SampleReader
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source
from paceline.data.sources.source_protocol import shard_sizes
from paceline.data.train_stream import TrainJob, TrainStream


class TrainLoader(TrainStream):
    """This rank's micro-batches in order, from `first_step` to the end of the run.

    DataError comes out of `next` also where storage fails. `remark` goes with the description.
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
        remark: str = "",
    ) -> None:
        super().__init__(
            len(source),
            plan,
            settings,
            seed=seed,
            rank=rank,
            first_step=first_step,
            workers=settings.workers,
            groups=shard_sizes(source),
        )
        self._pin_memory = pin_memory
        self._remark = remark
        self._prepare = create_preparer(source, TrainTransform(settings), settings)
        self._reader = SampleReader(source, self._prepare, self._log, self._clock)

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

    def describe(self) -> str:
        return _said(self._settings.workers, self._prepare.describe(), self._remark)

    def remark(self) -> str:
        return self._prepare.remark()


class EvalLoader(EvalPasses):
    """Every `iter` is one pass over this rank's samples, decoded anew."""

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        pin_memory: bool = False,
        remark: str = "",
    ) -> None:
        super().__init__(
            len(source),
            settings,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            workers=settings.workers,
        )
        self._pin_memory = pin_memory
        self._remark = remark
        self._prepare = create_preparer(source, EvalTransform(settings), settings)
        self._reader = SampleReader(source, self._prepare, self._log)

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

    def _finish(self, buffer: BatchBuffer, firsts: list[int], parts: list[Unfilled]) -> Batch:
        unfilled = in_batch(firsts, parts)
        corrupt = self._log.report(sample for _, sample in unfilled)
        return buffer.batch(corrupt, [row for row, _ in unfilled])

    def describe(self) -> str:
        return _said(self._settings.workers, self._prepare.describe(), self._remark)

    def remark(self) -> str:
        return self._prepare.remark()


def _said(workers: int, *remarks: str) -> str:
    text = f"{workers} thread{'' if workers == 1 else 's'}" if workers else "no threads"
    said = "; ".join(filter(None, remarks))
    return f"{text} ({said})" if said else text
