"""The images of `paceline bench input`, repeated where they are few.

In: the settings and a split. Out: a source of at least some thousand samples, so that an epoch's or a
pass's end is as rare as in a real data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.randomness import Int64
from paceline.data.settings import DataSettings
from paceline.data.sources.source import Source, Split, open_source

_LEAST = 20_000


class Repeated:
    """Sample i is the inner source's sample i modulo its length."""

    def __init__(self, inner: Source, times: int) -> None:
        self._inner = inner
        self.labels: Int64 = np.tile(inner.labels, times)

    @property
    def classes(self) -> Sequence[str]:
        return self._inner.classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> bytes | npt.NDArray[np.uint8]:
        return self._inner.read(i % len(self._inner))

    def name(self, i: int) -> str:
        return self._inner.name(i % len(self._inner))

    def close(self) -> None:
        self._inner.close()


class RepeatedFiles(Repeated):
    """Of a source that knows where its samples lie."""

    def extent(self, i: int) -> Any:
        return self._inner.extent(i % len(self._inner))  # type: ignore[attr-defined]


def open_repeated(settings: DataSettings, split: Split) -> Source:
    source = open_source(settings, split)
    times = -(-_LEAST // len(source))
    if times == 1:
        return source
    return (RepeatedFiles if hasattr(source, "extent") else Repeated)(source, times)
