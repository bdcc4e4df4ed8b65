"""`InputRow`: one way to feed a training, measured for a while.

In: a row: whose pipeline, how many workers, which images. Out: images/s that arrive as normalised tensors
on the device. Batches that lay ready before the clock ran are not counted, and the clock stops after
as many batches from every worker.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from paceline.data.settings import DataSettings

Kind = Literal["ours", "processes", "dataloader", "webdataset"]


@dataclass(frozen=True)
class InputRow:
    """`settings` are ours: directory, sizes, decoder; a peer does the same with them by its own means."""

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
        """What models compute with on the device."""
        return torch.float16 if self.device == "cuda" else torch.float32


class InputStream(Protocol):
    """Endless. `stored` batches at most lie ready when nobody has asked for one yet."""

    stored: int

    def __next__(self) -> torch.Tensor:
        """Normalised images, samples × channels × height × width, on the row's device."""

    def describe(self) -> str:
        """How they are made: what was chosen, and what stood in for what was asked for."""

    def remark(self) -> str:
        """What came up on the way; empty where there is nothing."""


@dataclass(frozen=True)
class RowSample:
    """Images/s of one round, and what ran."""

    rate: float
    described: str = ""
    remark: str = ""


def open_stream(row: InputRow) -> AbstractContextManager[InputStream]:
    """Starts the row's workers; leaving the context ends them."""
    from paceline.bench import input_ours, input_peers

    openers = {
        "ours": input_ours.open_threads,
        "processes": input_ours.open_processes,
        "dataloader": input_peers.open_dataloader,
        "webdataset": input_peers.open_webdataset,
    }
    return openers[row.kind](row)


def measure_row(row: InputRow, seconds: float) -> RowSample:
    """For at least `seconds`, from a running start."""
    with one_torch_thread(), open_stream(row) as stream:
        for _ in range(stream.stored + row.workers):
            next(stream)
        _wait(row.device)
        started, images, batches = time.perf_counter(), 0, 0
        while True:
            images += len(next(stream))
            batches += 1
            # Workers that take turns deliver in bunches: whole turns only.
            if batches % row.workers == 0 and time.perf_counter() - started >= seconds:
                _wait(row.device)
                rate = images / (time.perf_counter() - started)
                return RowSample(rate, stream.describe(), stream.remark())


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """As in a peer's worker; torch's threads would otherwise fight the pipeline's for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking where torch has threads; DataLoader forks all the same.
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            # As many workers as the user asked for, though the cores be fewer: it is measured.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            yield
    finally:
        torch.set_num_threads(before)
