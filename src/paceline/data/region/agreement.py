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
from paceline.data.decoding.decode import MODES

if TYPE_CHECKING:
    from paceline.data.region.library import RegionLibrary

_SIZE = 12
# Wide, tall, and smaller than the result; a box that is whole, one in the middle, one of fractions.
_SHAPES = ((61, 37), (37, 83), (9, 11))
_BOXES = ((0.0, 0.0, 1.0, 1.0), (0.3, 0.4, 0.8, 0.9), (0.11, 0.0, 0.57, 0.61))
_FLIPPED = Image.Transpose.FLIP_LEFT_RIGHT


def disagreement(library: RegionLibrary) -> str:
    """Empty where all is well. Takes some 20 ms."""
    for at, (width, height) in enumerate(_SHAPES):
        for kind, data in enumerate(_files(width, height)):
            for number, name in enumerate(RESAMPLING, start=at + kind):
                channels, flip = (1, 3, 3)[(number + at) % 3], number % 2 == 1
                if not _agrees(library, data, _BOXES[number % 3], name, channels, flip):
                    return f"its pixels differ from those of Pillow {PIL.__version__} ({name})"
    return ""


def _files(width: int, height: int) -> list[bytes]:
    """4:4:4, 4:2:2, 4:2:0, 4:4:0, progressive and grey."""
    noise = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((width, height), box=(0, 0, width / 4, height / 4))
    wide = _encoded(image, subsampling=1)
    return [
        _encoded(image, subsampling=0),
        wide,
        _encoded(image, subsampling=2),
        _with_tall_chroma(wide),
        _encoded(image, subsampling=2, progressive=True),
        _encoded(image.convert("L")),
    ]


def _encoded(image: Image.Image, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


def _with_tall_chroma(wide: bytes) -> bytes:
    """Pillow writes no 4:4:0. With sides and factors exchanged, the blocks of 4:2:2 make such a file."""
    frame = wide.index(b"\xff\xc0")
    height, width = wide[frame + 5 : frame + 7], wide[frame + 7 : frame + 9]
    start, rest = wide[: frame + 5], wide[frame + 12 :]
    return start + width + height + wide[frame + 9 : frame + 11] + b"\x12" + rest


def _agrees(
    library: RegionLibrary,
    data: bytes,
    share: tuple[float, float, float, float],
    name: str,
    channels: int,
    flip: bool,
) -> bool:
    """The file, and its pixels as a cache keeps them."""
    opened = Image.open(io.BytesIO(data))
    image = opened.convert(MODES[channels])
    left, top, right, bottom = share
    box = left * image.width, top * image.height, right * image.width, bottom * image.height
    got = np.empty((2, _SIZE, _SIZE, channels), dtype=np.uint8)
    if library.size(data) != image.size:
        return False
    if not library.prepare(data, image.size, box, flip, name, got[0]):
        return False
    if not library.square(pixels_of(opened), box, flip, name, got[1]):
        return False
    square = image.resize((_SIZE, _SIZE), RESAMPLING[name], box)
    want = pixels_of(square.transpose(_FLIPPED) if flip else square)
    return np.array_equal(got, np.stack([want, want]))
