"""Whether the region decoder gives this Pillow's pixels: asked once a process, before it is used.

In: a library. Out: what differs, or nothing. Pillow and libjpeg come in versions that no test has seen; a
training must not change with them unnoticed.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image

from paceline.data.augmentation.augment import RESAMPLING, pixels_of

if TYPE_CHECKING:
    from paceline.data.region.library import RegionLibrary

_SIZE = 12
# Wide, tall, and smaller than the result; a box that is whole, one in the middle, one of fractions.
_SHAPES = ((61, 37), (37, 83), (9, 11))
_BOXES = ((0.0, 0.0, 1.0, 1.0), (0.3, 0.4, 0.8, 0.9), (0.11, 0.0, 0.57, 0.61))


def disagreement(library: RegionLibrary) -> str:
    """Empty where all is well. Takes a few milliseconds."""
    generator = np.random.default_rng(0)
    for width, height in _SHAPES:
        noise = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((width, height), box=(0, 0, width / 4, height / 4))
        for subsampling in (0, 1, 2):
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=90, subsampling=subsampling)
            for number, name in enumerate(RESAMPLING):
                box = _scaled(_BOXES[(number + subsampling) % 3], width, height)
                if not _agrees(library, stream.getvalue(), (width, height), box, name):
                    return f"its pixels differ from those of Pillow {PIL.__version__} ({name})"
    return ""


def _scaled(box: tuple[float, ...], width: int, height: int) -> tuple[float, float, float, float]:
    left, top, right, bottom = box
    return left * width, top * height, right * width, bottom * height


def _agrees(
    library: RegionLibrary,
    data: bytes,
    shape: tuple[int, int],
    box: tuple[float, float, float, float],
    name: str,
) -> bool:
    got = np.empty((_SIZE, _SIZE, 3), dtype=np.uint8)
    if library.size(data) != shape or not library.prepare(data, shape, box, False, name, got):
        return False
    want = Image.open(io.BytesIO(data)).resize((_SIZE, _SIZE), RESAMPLING[name], box)
    return np.array_equal(got, pixels_of(want))
