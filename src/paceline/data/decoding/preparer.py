"""`Preparer`: from a sample as it is stored to the pixels that the model takes.

In: an encoded image or pixels, a row of uniform numbers and the place to write to. Out: height × width ×
channels in uint8, written in place; CorruptImage where there is no image. `PillowPreparer` decodes the
whole image; every other way gives the same pixels and the same errors, sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.data.augmentation.augment import Pixels, Transform
from paceline.data.decoding.decode import decode
from paceline.data.prefetch import Check
from paceline.data.sources.source_protocol import Source

Stored = bytes | npt.NDArray[np.uint8]


class Clock(Protocol):
    """Who wants to know what the time went into: `read`, `decode`, `augment` or `copy`."""

    def add(self, cause: str, seconds: float) -> None: ...


class Together(Protocol):
    """Used by many threads at once."""

    def __call__(
        self,
        indices: Sequence[int],
        rows: Sequence[Sequence[float]],
        outs: Sequence[Pixels],
        check: Check,
        clock: Clock | None = None,
    ) -> list[bool]:
        """Which of `outs` were filled, as single calls would; the others may have anything in them."""


class Preparer(Protocol):
    """Used by many threads at once. `draws` is the length of the row that a call takes."""

    @property
    def draws(self) -> int: ...

    def __call__(
        self, data: Stored, row: Sequence[float], out: Pixels, clock: Clock | None = None
    ) -> None:
        """CorruptImage leaves `out` with anything in it."""

    def together(self, source: Source) -> Together | None:
        """A quicker way to many samples of a source at once, where there is one."""

    def describe(self) -> str:
        """What decodes, for display; nothing where there is no choice to tell of."""

    def remark(self) -> str:
        """Which samples did not go the way that `describe` tells of; empty where all did."""


class PillowPreparer:
    """Decodes all of the image, then augments. Takes whatever Pillow takes."""

    def __init__(self, transform: Transform, channels: int, remark: str = "") -> None:
        """`remark` is what `describe` says."""
        self._transform = transform
        self._channels = channels
        self._remark = remark
        self.draws = transform.draws

    def __call__(
        self, data: Stored, row: Sequence[float], out: Pixels, clock: Clock | None = None
    ) -> None:
        if clock is None:
            self._transform(decode(data, self._channels), row, out)
            return
        start = perf_counter()
        image = decode(data, self._channels)
        decoded = perf_counter()
        self._transform(image, row, out)
        clock.add("decode", decoded - start)
        clock.add("augment", perf_counter() - decoded)

    def together(self, source: Source) -> Together | None:
        return None

    def describe(self) -> str:
        return self._remark

    def remark(self) -> str:
        return ""
