"""`paceline bench input`: rows (pipelines), how they are measured, and memory use of a long index.

A row is measured in images/s that arrive as normalized tensors on the device. Prefetched batches are
not counted, and the clock stops after the same number of batches from every worker.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from paceline.data import (
    BatchPlan,
    DataSettings,
    Int64,
    Source,
    Split,
    TrainBatches,
    create_train_loader,
    numbered_classes,
    open_source,
)
from paceline.data.sources.base import WrappedSource

Kind = Literal["ours", "processes", "dataloader", "webdataset"]
OnProgress = Callable[[str], None]
# Samples of a pass at least.
_LEAST = 20_000
# Classes of the stubbed index, and how often memory is read in an epoch.
_CLASSES = 1000
_MARKS = 20


@dataclass(frozen=True)
class InputRow:
    """`settings` are ours (directory, sizes, decoder); a peer does the same with its own means."""

    kind: Kind
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


def open_stream(row: InputRow) -> AbstractContextManager[InputStream]:
    """Starts the row's workers, which end with the context."""
    from paceline.bench import input_pipelines as pipelines

    openers = {
        "ours": pipelines.open_threads,
        "processes": pipelines.open_processes,
        "dataloader": pipelines.open_dataloader,
        "webdataset": pipelines.open_webdataset,
    }
    return openers[row.kind](row)


def measure_row(row: InputRow, seconds: float) -> RowSample:
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
    *,
    rounds: int,
    seconds: float,
    on_progress: OnProgress,
    measure: Callable[[InputRow, float], RowSample] = measure_row,
) -> list[RowRates]:
    """All rounds of all rows. Each round measures every row once and starts with another one, so that
    other load affects all alike. `on_progress` is called with a line for each sample."""
    samples: list[list[RowSample]] = [[] for _ in rows]
    for turn in range(rounds):
        for step in range(len(rows)):
            place = (turn + step) % len(rows)
            sample = measure(rows[place], seconds)
            samples[place].append(sample)
            on_progress(f"round {turn + 1}: {rows[place].name}: {sample.rate:,.0f} images/s")
    return [_together(row, found) for row, found in zip(rows, samples, strict=True)]


def _together(row: InputRow, samples: Sequence[RowSample]) -> RowRates:
    described = dict.fromkeys(sample.described for sample in samples if sample.described)
    remarks = dict.fromkeys(sample.remark for sample in samples if sample.remark)
    rates = tuple(sample.rate for sample in samples)
    return RowRates(row, rates, tuple(described), tuple(remarks))


def ratios(results: Sequence[RowRates]) -> dict[str, float]:
    """Our fastest row over the fastest of each kind of peer: medians of the rounds' ratios."""
    fastest: dict[str, RowRates] = {}
    for result in results:
        best = fastest.get(result.row.kind)
        if best is None or result.median > best.median:
            fastest[result.row.kind] = result
    ours = fastest.pop("ours", None)
    if ours is None:
        return {}
    return {
        f"{ours.row.name} / {peer.row.name}": statistics.median(
            mine / theirs for mine, theirs in zip(ours.rates, peer.rates, strict=True)
        )
        for peer in fastest.values()
    }


class StubbedImages(Source):
    """Labels and offsets of `count` samples, like an index of shards, with one image for all."""

    def __init__(self, count: int, image_size: int) -> None:
        self.classes = numbered_classes(_CLASSES)
        self.labels = np.arange(count, dtype=np.int64) % _CLASSES
        self._offsets: Int64 = np.arange(count, dtype=np.int64) * 110_592
        self._pixels = np.zeros((image_size, image_size, 3), dtype=np.uint8)

    def read(self, i: int) -> npt.NDArray[np.uint8]:
        return self._pixels

    def name(self, i: int) -> str:
        return f"stub:{self._offsets[i]}"

    def close(self) -> None:
        """Nothing to close."""


def measure_memory(
    samples: int, *, batch_size: int, image_size: int, workers: int, on_progress: OnProgress
) -> dict[str, Any]:
    """Resident memory in MiB, twenty times during an epoch of `samples` stubbed samples, and the time
    to seek to its middle."""
    settings = DataSettings(
        source="synthetic", image_size=image_size, eval_resize=0, augment="none", flip=False,
        workers=workers, resident="off",
    )  # fmt: skip
    before_mib = resident_mib()
    started = time.perf_counter()
    source = StubbedImages(samples, image_size)
    middle = BatchPlan(samples, 1, batch_size, batch_size, 1).total_steps // 2
    with _loader(source, settings, batch_size, middle) as loader:
        next(loader)
        seek_s = time.perf_counter() - started
    on_progress(f"seek to step {middle:,}: {seek_s:.2f} s")
    marks: list[float] = []
    done, began = 0, time.perf_counter()
    with _loader(source, settings, batch_size, 0) as loader:
        for batch in loader:
            done += len(batch)
            if done * _MARKS >= samples * (len(marks) + 1):
                marks.append(resident_mib())
                on_progress(f"{done:,} samples: {marks[-1]:,.0f} MiB resident")
    seconds = time.perf_counter() - began
    return {
        "samples": samples, "batch_size": batch_size, "image_size": image_size, "workers": workers,
        "seek_s": seek_s, "before_mib": before_mib, "resident_mib": marks,
        "most_mib": max(marks), "grown_mib": marks[-1] - marks[len(marks) // 10],
        "samples_per_s": done / seconds,
    }  # fmt: skip


def _loader(
    source: StubbedImages, settings: DataSettings, batch_size: int, first_step: int
) -> TrainBatches:
    plan = BatchPlan(len(source), 1, batch_size, batch_size, 1)
    return create_train_loader(
        source, plan, settings, seed=0, rank=0, first_step=first_step, device=torch.device("cpu")
    )


def resident_mib() -> float:
    """Resident memory of this process; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
