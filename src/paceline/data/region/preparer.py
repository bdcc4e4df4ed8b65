"""`RegionPreparer`: JPEGs and pixels through the region decoder, everything else through Pillow.

In: what a preparer takes. Out: the same pixels and errors as `PillowPreparer`. Files that the library
does not take (other formats, CMYK, turned by Exif) and files that are not as they should be are
Pillow's, which also finds the words for what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import perf_counter

from paceline.data.augmentation.augment import Pixels, SquareTransform
from paceline.data.decoding.preparer import Clock, PillowPreparer, Stored, Together
from paceline.data.region.library import RegionLibrary
from paceline.data.region.together import RegionTogether
from paceline.data.sources.source import Source


class RegionPreparer:
    """Decoding, cropping and resampling are one, and count as decoding; of pixels, as augmenting."""

    def __init__(self, transform: SquareTransform, channels: int, library: RegionLibrary) -> None:
        self._transform = transform
        self._library = library
        self._others = PillowPreparer(transform, channels)
        self.draws = transform.draws
        self._lock = threading.Lock()
        self._seen = self._refused = 0

    def __call__(
        self, data: Stored, row: Sequence[float], out: Pixels, clock: Clock | None = None
    ) -> None:
        start = perf_counter()
        if isinstance(data, bytes):
            cause, done = "decode", self._prepare(data, row, out)
        else:
            cause, done = "augment", self._resample(data, row, out)
        prepared = perf_counter()
        if clock is not None:
            clock.add(cause, prepared - start)
        self._count(done)
        if not done:
            self._others(data, row, out, clock)
            return
        self._transform.finish(row, out)
        if clock is not None:
            clock.add("augment", perf_counter() - prepared)

    def _prepare(self, data: bytes, row: Sequence[float], out: Pixels) -> bool:
        shape = self._library.size(data)
        if shape is None:
            return False
        transform = self._transform
        box, flip = transform.box(*shape, row), transform.flips(row)
        return self._library.prepare(data, shape, box, flip, transform.interpolation, out)

    def _resample(self, pixels: Pixels, row: Sequence[float], out: Pixels) -> bool:
        transform, (height, width, _) = self._transform, pixels.shape
        box, flip = transform.box(width, height, row), transform.flips(row)
        return self._library.square(pixels, box, flip, transform.interpolation, out)

    def together(self, source: Source) -> Together | None:
        """Only where files can be read together: for pixels in memory it gains too little."""
        if not hasattr(source, "extent"):
            return None
        return RegionTogether(source, self._transform, self._library, self._count_done)

    def _count(self, done: bool) -> None:
        with self._lock:
            self._seen += 1
            self._refused += not done

    def _count_done(self, samples: int) -> None:
        with self._lock:
            self._seen += samples

    def remark(self) -> str:
        if not self._refused:
            return ""
        return f"{self._refused:,} of {self._seen:,} samples went to Pillow, not the region decoder"

    def describe(self) -> str:
        return f"region decoder, {self._library.version}"
