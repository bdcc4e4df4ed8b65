"""`RegionPreparer`: JPEGs through the region decoder, everything else through Pillow.

In: what a preparer takes. Out: the same pixels and errors as `PillowPreparer`. Files that the library
does not take (other formats, CMYK, turned by Exif) and files that are not as they should be are
Pillow's, which also finds the words for what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from paceline.data.augmentation.augment import Pixels, SquareTransform
from paceline.data.decoding.preparer import Clock, PillowPreparer, Stored
from paceline.data.region.library import RegionLibrary


class RegionPreparer:
    """Decoding and augmenting are one, and count as decoding."""

    def __init__(self, transform: SquareTransform, channels: int, library: RegionLibrary) -> None:
        self._transform = transform
        self._library = library
        self._others = PillowPreparer(transform, channels)
        self.draws = transform.draws

    def __call__(
        self, data: Stored, row: Sequence[float], out: Pixels, clock: Clock | None = None
    ) -> None:
        start = perf_counter()
        if not isinstance(data, bytes) or not self._prepare(data, row, out):
            self._others(data, row, out, clock)
            return
        self._transform.finish(row, out)
        if clock is not None:
            clock.add("decode", perf_counter() - start)

    def _prepare(self, data: bytes, row: Sequence[float], out: Pixels) -> bool:
        shape = self._library.size(data)
        if shape is None:
            return False
        transform = self._transform
        box, flip = transform.box(*shape, row), transform.flips(row)
        return self._library.prepare(data, shape, box, flip, transform.interpolation, out)

    def describe(self) -> str:
        return f"region decoder, {self._library.version}"
