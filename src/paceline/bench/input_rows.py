"""Measures the speed of input pipelines (`paceline bench input`).

A row is one pipeline with its settings; its result is the number of images per second that arrive
as normalized tensors on the device. Batches that were prefetched before the start are not counted.
The clock stops after the same number of batches from every worker.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from paceline.data import (
    Batch,
    BatchPlan,
    DataSettings,
    EvalBatches,
    Normalizer,
    Source,
    Split,
    TrainBatches,
    create_eval_loader,
    create_train_loader,
    open_source,
)
from paceline.data.loaders.loader import PREFETCH_BATCHES
from paceline.data.sources.base import WrappedSource

OnProgress = Callable[[str], None]
_EPOCHS = 1_000_000
_MIN_SAMPLES_PER_EPOCH = 20_000


@dataclass(frozen=True)
class InputRow:
    """An input pipeline to measure.

    Attributes:
        kind: `ours`, or the name of another pipeline in `benchmarks.input_pipelines`.
        workers: Number of threads or processes that decode.
        settings: Folder, image size and decoder.
        split: `train` for random crops, `val` for center crops.
        batch_size: Images of a batch.
        device: `cpu` or `cuda`.
        seed: Seed of order and augmentation.
    """

    kind: str
    workers: int
    settings: DataSettings
    split: Literal["train", "val"]
    batch_size: int
    device: str
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} × {self.workers}"

    @property
    def dtype(self) -> torch.dtype:
        """The format of images on the device."""
        return torch.float16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class InputStream:
    """An endless stream of batches from an input pipeline.

    Attributes:
        batches: Normalized images, samples × channels × height × width, on the device of the row.
        stored: The maximum number of prefetched batches, which are not counted.
        described: How the batches are made, including automatic choices.
        remark: Returns a note on the measurement so far; it may be empty.
    """

    batches: Iterator[torch.Tensor]
    stored: int
    described: str
    remark: Callable[[], str] = str

    def __next__(self) -> torch.Tensor:
        return next(self.batches)


OpenStream = Callable[[InputRow], AbstractContextManager[InputStream]]


def normalized(batches: Iterator[Batch], row: InputRow) -> Iterator[torch.Tensor]:
    """Normalizes the batches of our loader on the device of `row`."""
    settings = row.settings
    normalize = Normalizer(settings.mean, settings.std, settings.channels, row.dtype)

    def normalize_batch(batch: Batch) -> torch.Tensor:
        return normalize(batch.images, row.device)

    return map(normalize_batch, batches)


def create_loader(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches | EvalBatches:
    """Creates the training or evaluation loader of this rank, for the split of `row`."""
    device = torch.device(row.device)
    if row.split == "train":
        step = row.batch_size * world_size
        plan = BatchPlan(len(source), _EPOCHS, step, row.batch_size, world_size)
        return create_train_loader(
            source, plan, row.settings, seed=row.seed, rank=rank, first_step=0, device=device
        )
    return create_eval_loader(
        source, row.settings, rank=rank, world_size=world_size, batch_size=row.batch_size,
        device=device,
    )  # fmt: skip


def endless(loader: TrainBatches | EvalBatches) -> Iterator[Batch]:
    """Yields batches without end: repeats evaluation loaders; training loaders have no end."""
    while True:
        yield from loader


@contextmanager
def open_threads(row: InputRow) -> Iterator[InputStream]:
    """Opens our input pipeline with the settings of `row`, and closes it at the end of the block."""
    settings = replace(row.settings, workers=row.workers)
    source = open_repeated(settings, row.split)
    try:
        with create_loader(replace(row, settings=settings), source) as loader:
            batches = normalized(endless(loader), row)
            yield InputStream(batches, PREFETCH_BATCHES, loader.describe(), loader.note)
    finally:
        source.close()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limits torch to one thread, as in a worker of DataLoader; more compete with the pipeline."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks of a process with threads; DataLoader forks regardless.
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            # The user may ask for more workers than cores.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
    finally:
        torch.set_num_threads(before)


class Repeated(WrappedSource):
    """A source that repeats a small source: sample i is sample i modulo the number of samples."""

    def __init__(self, inner: Source, times: int) -> None:
        super().__init__(inner)
        self.labels = np.tile(inner.labels, times)
        self.pixels, self.shard_sizes = None, None

    def at(self, i: int) -> int:
        return i % len(self.whole)


def open_repeated(settings: DataSettings, split: Split) -> Source:
    """Opens a source and repeats its samples until an epoch is long enough to measure."""
    source = open_source(settings, split)
    times = -(-_MIN_SAMPLES_PER_EPOCH // len(source))
    return source if times == 1 else Repeated(source, times)


@dataclass
class RowRates:
    """The measured images per second of a pipeline, and its distinct descriptions and remarks."""

    row: InputRow
    rates: list[float] = field(default_factory=list)
    described: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def measure(self, open_stream: OpenStream, seconds: float) -> None:
        """Measures the pipeline for `seconds` or longer after a warm-up, and stores images per second."""
        row = self.row
        with one_torch_thread(), open_stream(row) as stream:
            for _ in range(stream.stored + row.workers):
                next(stream)
            _wait(row.device)
            started, images = time.perf_counter(), 0
            while not images or time.perf_counter() - started < seconds:
                # Workers deliver in turns: only whole turns count.
                images += sum(len(next(stream)) for _ in range(row.workers))
            _wait(row.device)
            self.rates.append(images / (time.perf_counter() - started))
            for texts, text in (
                (self.described, stream.described),
                (self.remarks, stream.remark()),
            ):
                if text and text not in texts:
                    texts.append(text)

    def to_dict(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.name, "kind": row.kind, "workers": row.workers,
            "directory": row.settings.dir, "images_per_s": self.median,
            "lowest": min(self.rates), "highest": max(self.rates), "rounds": self.rates,
            "input": "; ".join(self.described), "remarks": self.remarks,
        }  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_rows(
    rows: Sequence[InputRow], *, rounds: int, seconds: float, on_progress: OnProgress,
    open_stream: OpenStream = open_threads,
) -> list[RowRates]:  # fmt: skip
    """Measures the speed of several input pipelines, each once in each round.

    Each round starts with another pipeline, so that other load on the machine affects all of them
    alike.

    Args:
        rows: The pipelines to measure.
        rounds: The number of rounds.
        seconds: The minimum duration of each measurement in seconds.
        on_progress: A function that receives a line of text for each measurement.
        open_stream: A function that opens the pipeline of a row.
    """
    results = [RowRates(row) for row in rows]
    for turn in range(rounds):
        for step in range(len(rows)):
            result = results[(turn + step) % len(rows)]
            result.measure(open_stream, seconds)
            on_progress(f"round {turn + 1}: {result.row.name}: {result.rates[-1]:,.0f} images/s")
    return results
