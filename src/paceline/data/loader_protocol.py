"""What training and evaluation know of a loader, wherever its batches are made.

In: nothing; these are protocols. Out: an iterator of batches that says what it found corrupt, what it
is, and can be closed in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from paceline.data.batch import Batch
from paceline.data.corrupt import CorruptSample


class _Loader(Protocol):
    @property
    def corrupt(self) -> tuple[CorruptSample, ...]:
        """All corrupt samples met so far, each once, in the order of the stream."""

    def describe(self) -> str:
        """How the batches are made, for display: `resident on cuda:0, 146 MiB`, `2 threads`."""

    def remark(self) -> str:
        """What a person should know at the end; empty where there is nothing."""

    def __iter__(self) -> Iterator[Batch]: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


@runtime_checkable
class TrainBatches(_Loader, Protocol):
    """This rank's micro-batches in order, once, to the end of the run."""

    def __next__(self) -> Batch: ...


@runtime_checkable
class EvalBatches(_Loader, Protocol):
    """Every `iter` is one pass; `len` counts this rank's samples, corrupt ones included."""

    def __len__(self) -> int: ...
