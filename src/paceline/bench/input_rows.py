"""`paceline bench input`: rows (pipelines) and how they are measured.

A row is measured in images/s that arrive as normalized tensors on the device. Prefetched batches are
not counted, and the clock stops after the same number of batches from every worker.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
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
# Samples of a pass at least.
_LEAST = 20_000


@dataclass(frozen=True)
class InputRow:
    """`settings` are ours (directory, sizes, decoder); a peer does the same with its own means. `kind`
    selects what opens it."""

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
    """`batches` of normalized images, samples × channels × height × width, on the row's device, without
    end. At most `stored` of them are prefetched. `described`: how they are made, with automatic choices
    and replacements. `remark` returns a note on the measurement so far, which may be empty."""

    batches: Iterator[torch.Tensor]
    stored: int
    described: str
    remark: Callable[[], str] = str

    def __next__(self) -> torch.Tensor:
        return next(self.batches)


@dataclass(frozen=True)
class RowSample:
    """Images/s of one round, and a description of the pipeline."""

    rate: float
    described: str = ""
    remark: str = ""


OpenStream = Callable[[InputRow], AbstractContextManager[InputStream]]


def normalized(batches: Iterator[Batch], row: InputRow) -> Iterator[torch.Tensor]:
    """Our batches, normalized on the device. None is held longer than that takes."""
    settings = row.settings
    normalize = Normalizer(settings.mean, settings.std, settings.channels, row.dtype)

    def made(batch: Batch) -> torch.Tensor:
        return normalize(batch.images, row.device)

    return map(made, batches)


def create_loader(
    row: InputRow, source: Source, *, rank: int = 0, world_size: int = 1
) -> TrainBatches | EvalBatches:
    """The loader that training or evaluation would use."""
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
    """Repeats passes over validation images; the training stream never ends by itself."""
    while True:
        yield from loader


@contextmanager
def open_threads(row: InputRow) -> Iterator[InputStream]:
    settings = replace(row.settings, workers=row.workers)
    source = open_repeated(settings, row.split)
    try:
        with create_loader(replace(row, settings=settings), source) as loader:
            batches = normalized(endless(loader), row)
            yield InputStream(batches, PREFETCH_BATCHES, loader.describe(), loader.note)
    finally:
        source.close()


def measure_row(row: InputRow, open_stream: OpenStream, seconds: float) -> RowSample:
    """Measures for at least `seconds`, after a warm-up."""
    with one_torch_thread(), open_stream(row) as stream:
        for _ in range(stream.stored + row.workers):
            next(stream)
        _wait(row.device)
        started, images, batches = time.perf_counter(), 0, 0
        while True:
            images += len(next(stream))
            batches += 1
            # Workers deliver in turns: only whole turns count.
            if batches % row.workers == 0 and time.perf_counter() - started >= seconds:
                _wait(row.device)
                rate = images / (time.perf_counter() - started)
                return RowSample(rate, stream.described, stream.remark())


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One torch thread, as in a peer's worker; more would compete with the pipeline for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with threads; DataLoader forks regardless.
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            # The user may ask for more workers than cores.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
    finally:
        torch.set_num_threads(before)


class Repeated(WrappedSource):
    """Sample i is the inner source's sample i modulo its length."""

    def __init__(self, inner: Source, times: int) -> None:
        super().__init__(inner)
        self.labels = np.tile(inner.labels, times)
        self.pixels, self.shard_sizes = None, None

    def at(self, i: int) -> int:
        return i % len(self.whole)


def open_repeated(settings: DataSettings, split: Split) -> Source:
    source = open_source(settings, split)
    times = -(-_LEAST // len(source))
    if times == 1:
        return source
    return Repeated(source, times)


@dataclass(frozen=True)
class RowRates:
    """`rates` has one value per round. `described` and `remarks` hold each text once."""

    row: InputRow
    rates: tuple[float, ...]
    described: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    def to_dict(self) -> dict[str, Any]:
        row = self.row
        return {
            "name": row.name, "kind": row.kind, "workers": row.workers,
            "directory": row.settings.dir, "images_per_s": self.median,
            "lowest": min(self.rates), "highest": max(self.rates), "rounds": list(self.rates),
            "input": "; ".join(self.described), "remarks": list(self.remarks),
        }  # fmt: skip


def measure_rows(
    rows: Sequence[InputRow],
    openers: Mapping[str, OpenStream],
    *,
    rounds: int,
    seconds: float,
    on_progress: OnProgress,
    measure: Callable[[InputRow, OpenStream, float], RowSample] = measure_row,
) -> list[RowRates]:
    """All rounds of all rows. Each round measures every row once and starts with another one, so that
    other load affects all alike. `openers`: by kind of row.
    `on_progress` is called with a line for each sample."""
    samples: list[list[RowSample]] = [[] for _ in rows]
    for turn in range(rounds):
        for step in range(len(rows)):
            place = (turn + step) % len(rows)
            sample = measure(rows[place], openers[rows[place].kind], seconds)
            samples[place].append(sample)
            on_progress(f"round {turn + 1}: {rows[place].name}: {sample.rate:,.0f} images/s")
    return [_together(row, found) for row, found in zip(rows, samples, strict=True)]


def _together(row: InputRow, samples: Sequence[RowSample]) -> RowRates:
    described = dict.fromkeys(sample.described for sample in samples if sample.described)
    remarks = dict.fromkeys(sample.remark for sample in samples if sample.remark)
    rates = tuple(sample.rate for sample in samples)
    return RowRates(row, rates, tuple(described), tuple(remarks))
