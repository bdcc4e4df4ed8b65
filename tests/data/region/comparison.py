"""Two decoders side by side: what Pillow makes of a file, pixels or a reason, and what the region
decoder does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.small import FileSource
from paceline.data import CorruptImage
from paceline.data.augment import SquareTransform
from paceline.data.decode.decoder import PillowDecoder
from paceline.data.decode.library import RegionLibrary
from paceline.data.decode.region import RegionDecoder
from paceline.data.prefetch import Progress
from paceline.data.sources.base import Stored

# Flags of `write_jpeg.c`.
PROGRESSIVE, ARITHMETIC, STORE_RGB, SEPARATE_SCANS, FEW_SCANS = 1, 2, 4, 8, 16
Outcome = np.ndarray | str


def pillow(transform: SquareTransform, channels: int = 3) -> PillowDecoder:
    return PillowDecoder(FileSource([]), transform, channels=channels)


def region(library: RegionLibrary, transform: SquareTransform, channels: int = 3) -> RegionDecoder:
    return RegionDecoder(FileSource([]), transform, library, channels=channels)


def outcome(
    decoder: PillowDecoder,
    data: Stored,
    row: Sequence[float] = (),
    progress: Progress | None = None,
) -> Outcome:
    size = decoder.transform.size
    out = np.full((size, size, decoder.channels), 7, dtype=np.uint8)
    try:
        decoder.prepare(data, row, out, progress or Progress())
    except CorruptImage as error:
        return str(error)
    return out


class Comparison:
    """`taken` counts the files that the library itself decoded."""

    def __init__(self, library: RegionLibrary, transform: SquareTransform, channels: int) -> None:
        self._library = library
        self._transform = transform
        self._channels = channels
        self._decoders = pillow(transform, channels), region(library, transform, channels)
        self.taken = 0

    def both(self, data: Stored, row: Sequence[float]) -> tuple[Outcome, Outcome]:
        by_pillow, by_region = (outcome(decoder, data, row) for decoder in self._decoders)
        return by_pillow, by_region

    def agrees(self, data: bytes, row: Sequence[float] = ()) -> bool:
        by_pillow, by_region = self.both(data, row)
        self.taken += self._is_taken(data, row)
        return type(by_pillow) is type(by_region) and bool(np.all(by_pillow == by_region))

    def _is_taken(self, data: bytes, row: Sequence[float]) -> bool:
        shape = self._library.size(data)
        if shape is None:
            return False
        size = self._transform.size
        out = np.empty((size, size, self._channels), dtype=np.uint8)
        box, name = self._transform.box(*shape, row), self._transform.interpolation
        return self._library.prepare(data, shape, box, False, name, out)
