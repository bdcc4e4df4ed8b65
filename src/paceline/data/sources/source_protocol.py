"""`Source`: labelled images by index; what every kind of storage offers.

In: nothing. Out: the protocols. Beyond them a source may have `groups` (samples of each of its shards, in
order), `retry` (how often reads were repeated), `remark` (what is to be told about opening it),
`identity()` (see source_identity.py) and `extent(i)` (shard, offset and size of a sample's file, None
where it has none: then samples can be read many at a time). One around another calls that `kept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from paceline.data.randomness import Int64

Split = Literal["train", "val"]


class Source(Protocol):
    """Read by several threads at once. `read` raises DataError where storage fails."""

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def labels(self) -> Int64: ...

    def __len__(self) -> int: ...

    def read(self, i: int) -> bytes | npt.NDArray[np.uint8]:
        """The encoded image, or its pixels as height × width × channels."""

    def name(self, i: int) -> str:
        """Where the sample lies, for messages."""

    def close(self) -> None: ...


def shard_sizes(source: Source) -> Sequence[int] | None:
    """Samples of each shard, None where the data is not in shards."""
    sizes: Sequence[int] | None = getattr(source, "groups", None)
    return sizes


def source_kind(source: Source) -> str:
    """What the images are stored in, for display; a cache around it has its own remark."""
    kept: Source | None = getattr(source, "kept", None)
    return type(source).__name__ if kept is None else source_kind(kept)


def with_remark(text: str, source: Source) -> str:
    """`text`, and what the source has to tell about itself."""
    return "; ".join(filter(None, (text, getattr(source, "remark", ""))))


def source_counters(source: Source) -> dict[str, int]:
    """What a source counted so far: reads that were repeated, and hits and misses of a cache."""
    found: dict[str, int] = {}
    retry = getattr(source, "retry", None)
    if retry is not None:
        found["read_retries"] = retry.count
    counters = getattr(source, "cache_counters", None)
    return found | (counters() if counters is not None else {})


@runtime_checkable
class ArraySource(Source, Protocol):
    """One that has all its images at hand, equal in size: samples × height × width × channels."""

    @property
    def pixels(self) -> npt.NDArray[np.uint8]: ...
