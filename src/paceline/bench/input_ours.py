"""Our pipeline as a row of `paceline bench input`: threads as in training, or the same in processes.

In: an `InputRow`. Out: its batches, normalised on the device. The processes are torch's DataLoader
workers, each with our loader without threads, whose batches come back through shared memory: what our
pipeline would be, were it built on processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from paceline.bench.input_row import InputRow, InputStream
from paceline.bench.input_source import open_repeated
from paceline.data.batch import Batch
from paceline.data.batch_plan import BatchPlan
from paceline.data.create_loader import create_eval_loader, create_train_loader
from paceline.data.loader_protocol import EvalBatches, TrainBatches
from paceline.data.normalize import Normalizer
from paceline.data.sources.source import Source

_EPOCHS = 1_000_000


class Normalized:
    """Our batches as the model takes them. `described` says how they are made."""

    def __init__(
        self, batches: Iterator[Batch], row: InputRow, stored: int, described: str,
        remark: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        settings = row.settings
        self.stored = stored
        self._described, self._remark = described, remark
        self._batches = batches
        self._device = row.device
        self._normalize = Normalizer(settings.mean, settings.std, settings.channels, row.dtype)

    def __next__(self) -> torch.Tensor:
        return self._normalize(next(self._batches).images, self._device)

    def describe(self) -> str:
        return self._described

    def remark(self) -> str:
        return self._remark()


def create_loader(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches | EvalBatches:
    """The loader that training, or evaluation, would have."""
    if row.split == "train":
        return create_train_loader_of(row, source, rank=rank, world_size=world_size)
    return create_eval_loader(
        source, row.settings, rank=rank, world_size=world_size, batch_size=row.batch_size,
        device=torch.device(row.device),
    )  # fmt: skip


def create_train_loader_of(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches:
    step = row.batch_size * world_size
    plan = BatchPlan(len(source), _EPOCHS, step, row.batch_size, world_size)
    return create_train_loader(
        source, plan, row.settings, seed=row.seed, rank=rank, first_step=0,
        device=torch.device(row.device),
    )  # fmt: skip


def endless(loader: TrainBatches | EvalBatches) -> Iterator[Batch]:
    """Passes over validation images one after the other; training's stream ends never."""
    while True:
        yield from loader


@contextmanager
def open_threads(row: InputRow) -> Iterator[InputStream]:
    settings = replace(row.settings, workers=row.workers)
    source = open_repeated(settings, row.split)
    try:
        with create_loader(replace(row, settings=settings), source) as loader:
            yield Normalized(
                endless(loader), row, settings.prefetch_batches, loader.describe(), loader.remark
            )
    finally:
        source.close()


class OurBatches(IterableDataset[Batch]):
    """Each worker makes every so-manieth batch, as a rank would."""

    def __init__(self, row: InputRow) -> None:
        self._row = row

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        assert worker is not None
        row = self._threadless()
        source = open_repeated(row.settings, row.split)  # a worker's, until its end
        return endless(create_loader(row, source, rank=worker.id, world_size=worker.num_workers))

    def _threadless(self) -> InputRow:
        settings = replace(self._row.settings, workers=0)
        return replace(self._row, settings=settings, device="cpu")

    def describe(self) -> str:
        """Of a worker: the like of its loader, made here."""
        row = self._threadless()
        source = open_repeated(row.settings, row.split)
        try:
            with create_loader(row, source) as loader:
                return f"processes, each {loader.describe()}"
        finally:
            source.close()


@contextmanager
def open_processes(row: InputRow) -> Iterator[InputStream]:
    ours = OurBatches(row)
    described = ours.describe()
    loader = DataLoader(
        ours, batch_size=None, num_workers=row.workers, multiprocessing_context="fork",
        pin_memory=row.device == "cuda",
    )  # fmt: skip
    batches = iter(loader)
    yield Normalized(batches, row, 2 * row.workers, described)
