"""`ImageFacts`: what an encoded image says about itself in its header.

In: the bytes of an image, or pixels. Out: format, mode and size, without decoding it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

_GREY_MODES = ("1", "L", "LA", "La")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class ImageFacts:
    """`format` is Pillow's name, or `pixels`; `unknown` where the header cannot be read."""

    format: str
    mode: str
    width: int = 0
    height: int = 0

    @property
    def channels(self) -> int:
        """In which the image loses no colour: 1 for grey of any depth, else 3."""
        return 1 if self.mode in _GREY_MODES or self.mode.startswith("I") else 3


def image_facts(data: bytes | npt.NDArray[np.uint8]) -> ImageFacts:
    """Never fails: what is wrong with damaged bytes is the decoder's to say."""
    if isinstance(data, np.ndarray):
        height, width, channels = data.shape
        return ImageFacts("pixels", "L" if channels == 1 else "RGB", width, height)
    try:
        with Image.open(io.BytesIO(data)) as image:
            return ImageFacts(str(image.format), image.mode, *image.size)
    except Exception:  # noqa: BLE001 - damaged bytes make Pillow raise almost anything
        return ImageFacts(UNKNOWN, UNKNOWN)
