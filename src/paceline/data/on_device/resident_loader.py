"""`ResidentTrainLoader` and `ResidentEvalLoader`: batches made on the device, from a resident set.

In: the set, the settings, and which rank this is. Out: the batches that the threaded loaders would give,
in the device's memory. Per sample a few whole numbers travel, drawn one batch ahead by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from paceline.data.augmentation.augment_numbers import AugmentNumbers
from paceline.data.batch import Batch
from paceline.data.batch_plan import BatchPlan
from paceline.data.corrupt import CorruptSample
from paceline.data.eval_passes import EvalJob, EvalPasses, Unfilled
from paceline.data.on_device.device_augment import DeviceAugment
from paceline.data.on_device.own_stream import marked
from paceline.data.on_device.resident_set import ResidentSet
from paceline.data.prefetch import Check, Job
from paceline.data.randomness import Int64, uniform
from paceline.data.settings import DataSettings
from paceline.data.successor import successor
from paceline.data.train_stream import TrainJob, TrainStream


class ResidentTrainLoader(TrainStream):
    """This rank's micro-batches in order, from `first_step` to the end of the run."""

    def __init__(
        self,
        held: ResidentSet,
        plan: BatchPlan,
        settings: DataSettings,
        *,
        seed: int,
        rank: int,
        first_step: int = 0,
        groups: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            len(held),
            plan,
            settings,
            seed=seed,
            rank=rank,
            first_step=first_step,
            # The hashes of a batch take a millisecond: more threads would only wait for one another.
            workers=min(1, settings.workers),
            groups=groups,
        )
        height, width, _ = held.shape
        self._held = held
        self._numbers = AugmentNumbers(settings, height, width)
        self._augment = DeviceAugment(held, settings)
        self._is_corrupt = np.zeros(len(held), dtype=np.bool_)
        self._is_corrupt[list(held.corrupt)] = True

    def _job(self, start: int, stop: int) -> TrainJob:
        # Allocated here, in the consumer: in a new thread, pinning would open the first GPU.
        numbers = torch.empty(
            (1 + self._numbers.count, stop - start),
            dtype=torch.int64,
            pin_memory=self._held.device.type == "cuda",
        )
        return Job([partial(self._draw, start, numbers.numpy())], partial(self._finish, numbers))

    def _draw(self, start: int, numbers: Int64, check: Check) -> list[CorruptSample]:
        """Fills `numbers`: the sample in the first row, its augmentation below."""
        began, order = time.perf_counter(), self._order
        epochs, indices = order.at(start, start + numbers.shape[1])
        met: list[CorruptSample] = []
        for i in np.flatnonzero(self._is_corrupt[indices]).tolist():
            check()
            first = self._held.corrupt[int(indices[i])]
            passed, _, epoch, index = successor(order, start + i, first, self._load, self._log)
            met += passed
            epochs[i], indices[i] = epoch[0], index[0]
        numbers[0] = indices
        self._numbers.fill(uniform(order.seed, epochs, indices, self._numbers.draws), numbers[1:])
        self._clock.add("augment", time.perf_counter() - began)
        return met

    def _load(self, index: int) -> int | CorruptSample:
        return self._held.corrupt.get(index, index)

    def _finish(self, numbers: torch.Tensor, parts: list[list[CorruptSample]]) -> Batch:
        corrupt = self._log.report(sample for part in parts for sample in part)
        # What this stream does from here on is work, not a wait for the input.
        begun = marked(self._held.device)
        there = numbers.to(self._held.device, non_blocking=True)
        labels = self._held.labels.index_select(0, there[0])
        return Batch(self._augment(there[0], there[1:]), labels, corrupt, begun=begun)

    def describe(self) -> str:
        return self._held.describe()


class ResidentEvalLoader(EvalPasses):
    """Every `iter` is one pass over this rank's samples, which lie ready."""

    def __init__(
        self,
        held: ResidentSet,
        settings: DataSettings,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
    ) -> None:
        super().__init__(
            len(held),
            settings,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            workers=0,
        )
        self._held = held

    def _job(self, indices: Int64) -> EvalJob:
        return Job([], partial(self._finish, indices))

    def _finish(self, indices: Int64, _: list[Unfilled]) -> Batch:
        known = self._held.corrupt
        corrupt = self._log.report(known[i] for i in indices.tolist() if i in known)
        good = [i for i in indices.tolist() if i not in known]
        pinned = self._held.device.type == "cuda"
        here = torch.tensor(good, dtype=torch.int64, pin_memory=pinned)
        there = here.to(self._held.device, non_blocking=True)
        images = self._held.images.index_select(0, there)
        return Batch(images, self._held.labels.index_select(0, there), corrupt)

    def describe(self) -> str:
        return self._held.describe()
