"""What becomes of one image when it is packed.

In: an encoded image, or pixels. Out: bytes and the extension that tells their format. An image that is
small enough and in a wanted format is copied byte for byte; all others are turned upright, scaled, and
encoded anew as grey or RGB. An image that cannot be decoded whole is `CorruptImage`, copied or not.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from paceline.data.decoding.decode import CorruptImage, decode
from paceline.data.decoding.image_facts import image_facts
from paceline.data.packing.pack_options import PackOptions

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class PackedImage:
    extension: str
    content: bytes
    copied: bool


def pack_image(data: bytes | npt.NDArray[np.uint8], options: PackOptions) -> PackedImage:
    """Equal input and options give equal bytes, with one version of Pillow and its libraries."""
    facts = image_facts(data)
    image = decode(data, facts.channels)
    # Pillow's name for the JPEGs of cameras that hold a second picture behind the first.
    found = "JPEG" if facts.format == "MPO" else facts.format
    wanted = found if options.format == "keep" else options.format.upper()
    size = fitted(image.size, options.short_side)
    if isinstance(data, bytes) and size == image.size and wanted == found in _EXTENSIONS:
        return PackedImage(_EXTENSIONS[found], data, copied=True)
    if size != image.size:
        image = image.resize(size, _FILTERS[options.filter])
    # What has no format of ours, such as pixels or a GIF under a wrong name, must lose nothing.
    kind = wanted if wanted in _EXTENSIONS else "PNG"
    return PackedImage(_EXTENSIONS[kind], _encoded(image, kind, options.quality), copied=False)


def fitted(size: tuple[int, int], short_side: int) -> tuple[int, int]:
    """Width and height with the short side brought down to `short_side`; never enlarged."""
    shorter = min(size)
    if not short_side or shorter <= short_side:
        return size
    width, height = (max(1, round(side * short_side / shorter)) for side in size)
    return width, height


def _encoded(image: Image.Image, kind: str, quality: int) -> bytes:
    stream = io.BytesIO()
    try:
        if kind == "PNG":
            image.save(stream, kind)
        else:
            image.save(stream, kind, quality=quality)
    except (OSError, ValueError) as error:
        # A side that the format cannot hold, such as 20,000 pixels in WebP.
        raise CorruptImage(f"cannot be written as {kind} ({error})") from error
    return stream.getvalue()
