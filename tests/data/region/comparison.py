"""Two preparers side by side.

In: a transform and a file. Out: what Pillow makes of it, pixels or words, and what the region decoder
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.data.augmentation.augment import SquareTransform
from paceline.data.decoding.decode import CorruptImage
from paceline.data.decoding.preparer import PillowPreparer, Preparer, Stored
from paceline.data.region.library import RegionLibrary
from paceline.data.region.preparer import RegionPreparer

Outcome = np.ndarray | str


def outcome(
    prepare: Preparer, data: Stored, row: Sequence[float], size: int, channels: int
) -> Outcome:
    out = np.full((size, size, channels), 7, dtype=np.uint8)
    try:
        prepare(data, row, out)
    except CorruptImage as error:
        return str(error)
    return out


class Comparison:
    """`taken` counts the files that the library itself decoded."""

    def __init__(self, library: RegionLibrary, transform: SquareTransform, channels: int) -> None:
        self._library = library
        self._transform = transform
        self._channels = channels
        self._pillow = PillowPreparer(transform, channels)
        self._region = RegionPreparer(transform, channels, library)
        self.taken = 0

    def both(self, data: Stored, row: Sequence[float]) -> tuple[Outcome, Outcome]:
        ways = (self._pillow, self._region)
        pillow, region = (
            outcome(way, data, row, self._transform.size, self._channels) for way in ways
        )
        return pillow, region

    def agrees(self, data: bytes, row: Sequence[float] = ()) -> bool:
        pillow, region = self.both(data, row)
        self.taken += self._is_taken(data, row)
        return type(pillow) is type(region) and bool(np.all(pillow == region))

    def _is_taken(self, data: bytes, row: Sequence[float]) -> bool:
        shape = self._library.size(data)
        if shape is None:
            return False
        size = self._transform.size
        out = np.empty((size, size, self._channels), dtype=np.uint8)
        box, name = self._transform.box(*shape, row), self._transform.interpolation
        return self._library.prepare(data, shape, box, False, name, out)
