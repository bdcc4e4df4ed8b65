"""`DeviceTrainLoader` and `DeviceEvalLoader`: batches decoded and augmented on the GPU.

In: a source of JPEGs, the settings, and which rank this is. Out: batches of pixels on the GPU: samples,
boxes and flips are those of the threaded loaders. Pixels differ by a few levels, because decoders round
and interpolate colour in their own ways. Threads read ahead and keep the GPU's decoder busy.
"""

from __future__ import annotations

from functools import partial

import torch

from paceline.data.augmentation.augment import EvalTransform, TrainTransform
from paceline.data.batch import Batch
from paceline.data.batch_plan import BatchPlan
from paceline.data.cause_clock import CauseClock
from paceline.data.corrupt import CorruptSample
from paceline.data.eval_passes import EvalJob, EvalPasses, Unfilled, in_batch
from paceline.data.on_device.batch_decoder import CHUNK
from paceline.data.on_device.device_reader import DeviceReader
from paceline.data.on_device.own_stream import marked
from paceline.data.prefetch import Job
from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source
from paceline.data.sources.source_protocol import shard_sizes
from paceline.data.train_stream import TrainJob, TrainStream


class DeviceTrainLoader(TrainStream):
    """This rank's micro-batches in order, from `first_step` to the end of the run. `remark` goes with the
    description."""

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        settings: DataSettings,
        *,
        seed: int,
        rank: int,
        first_step: int = 0,
        device: torch.device,
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
        self._device = device
        self._chosen = remark
        transform = TrainTransform(settings)
        self._reader = DeviceReader(source, transform, settings, device, self._log, self._clock)

    def _job(self, start: int, stop: int) -> TrainJob:
        labels, here = _labels(stop - start, self._device)
        cuts = chunks_of(stop - start)
        parts: list[torch.Tensor | None] = [None] * len(cuts)
        chunks = [
            partial(
                self._reader.fill_stream, self._order, start + first, here[first:last], parts, place
            )
            for place, (first, last) in enumerate(cuts)
        ]
        return Job(chunks, partial(self._finish, parts, labels))

    def _finish(
        self,
        parts: list[torch.Tensor | None],
        labels: torch.Tensor,
        met: list[list[CorruptSample]],
    ) -> Batch:
        corrupt = self._log.report(sample for part in met for sample in part)
        # What this stream does from here on is work, not a wait for the input.
        begun = marked(self._device)
        return Batch(_together(parts), labels, corrupt, begun=begun)

    def describe(self) -> str:
        return self._reader.describe(self._chosen)

    def remark(self) -> str:
        return self._reader.remark()


class DeviceEvalLoader(EvalPasses):
    """Every `iter` is one pass over this rank's samples, decoded anew. `remark` as in training."""

    def __init__(
        self,
        source: Source,
        settings: DataSettings,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        device: torch.device,
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
        self._device = device
        self._chosen = remark
        transform = EvalTransform(settings)
        self._reader = DeviceReader(source, transform, settings, device, self._log, CauseClock())

    def _job(self, indices: Int64) -> EvalJob:
        labels, here = _labels(len(indices), self._device)
        cuts = chunks_of(len(indices))
        parts: list[torch.Tensor | None] = [None] * len(cuts)
        chunks = [
            partial(self._reader.fill_indices, indices[first:last], here[first:last], parts, place)
            for place, (first, last) in enumerate(cuts)
        ]
        firsts = [first for first, _ in cuts]
        return Job(chunks, partial(self._finish, parts, labels, firsts))

    def _finish(
        self,
        parts: list[torch.Tensor | None],
        labels: torch.Tensor,
        firsts: list[int],
        found: list[Unfilled],
    ) -> Batch:
        unfilled = in_batch(firsts, found)
        corrupt = self._log.report(sample for _, sample in unfilled)
        images = _together(parts)
        if not unfilled:
            return Batch(images, labels, corrupt)
        dropped = {row for row, _ in unfilled}
        kept = torch.tensor([row for row in range(len(labels)) if row not in dropped])
        return Batch(images[kept.to(images.device)], labels[kept], corrupt)

    def describe(self) -> str:
        return self._reader.describe(self._chosen)

    def remark(self) -> str:
        return self._reader.remark()


def chunks_of(length: int) -> list[tuple[int, int]]:
    """Of a batch: as few as hold CHUNK at most, of about one size, whatever the number of threads."""
    count = -(-length // CHUNK)
    size = -(-length // max(1, count))
    return [(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _labels(count: int, device: torch.device) -> tuple[torch.Tensor, Int64]:
    """Allocated in the consumer: in a new thread, pinning would open the first GPU."""
    labels = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
    return labels, labels.numpy()


def _together(parts: list[torch.Tensor | None]) -> torch.Tensor:
    """One tensor, on the consumer's stream, in the order of the samples."""
    images = [part for part in parts if part is not None]
    if images[0].is_cuda:
        stream = torch.cuda.current_stream(images[0].device)
        for image in images:
            # The memory is the worker's stream's, which must not take it back before this one read it.
            image.record_stream(stream)
    return images[0] if len(images) == 1 else torch.cat(images)
